"""The activations of MLPs, and what they multiply."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(numbers: Tensor) -> Tensor:
    """Return the usual approximation of GELU."""
    return F.gelu(numbers, approximate="tanh")


def multiply_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return `activation(gate) * up` in torch's own steps; see `gated_mlp.gate`."""
    gates, ups = gate_up.chunk(2, dim=-1)
    return activation(gates) * ups


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}
"""By the name in `config.json`."""
