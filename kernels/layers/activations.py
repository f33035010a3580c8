"""The activations of MLPs."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(numbers: Tensor) -> Tensor:
    """Return the usual approximation of GELU."""
    return F.gelu(numbers, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}
"""By the name in `config.json`."""
