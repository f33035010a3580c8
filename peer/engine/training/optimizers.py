"""Applies the gradient of an update to the weights of a span.

Every step is a function of weights, gradient and optimizer state alone, so that replicas that start
equal stay equal. Muon takes each matrix whole, and a span holds its matrices whole, so replicas
exchange nothing for it.

The rules are torch's functions and `muon.py`: to make one of torch's optimizer objects takes two
seconds of imports, and each process of a run would wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ....kernels.adamw_8bit import AdamW8bit, make_state
from ....protocol.errors import UsageError
from ....protocol.runs.training_run import Optimizer
from .muon import apply_muon

_Rule = Literal["muon", "adamw", "adamw8bit", "sgd"]


class SpanOptimizer:
    """The optimizer of a span's weights, which are given by their names in a checkpoint.

    Muon updates the matrices of blocks. Embedding, head, norms and biases are AdamW's under Muon,
    too (Jordan et al., 2024). The experts of a block may be one weight of three dimensions, which
    Muon takes as that many matrices. Raises UsageError where this machine lacks the optimizer.
    """

    def __init__(self, config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self._adamw_8bit = _open_adamw_8bit() if config.name == "adamw8bit" else None
        self._weights = {name: weight.detach() for name, weight in parameters.items()}
        self._rules: dict[str, _Rule] = {
            name: _choose_rule(config, name, one) for name, one in parameters.items()
        }
        self._state = {
            name: _make_state(self._rules[name], one) for name, one in parameters.items()
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate_factor: float) -> None:
        """Update the weights with these gradients, at a factor of the highest learning rate."""
        config = self._config
        muon_rate = adamw_rate = config.learning_rate * learning_rate_factor
        if config.name == "muon" and config.adamw_learning_rate is not None:
            adamw_rate = config.adamw_learning_rate * learning_rate_factor
        for name, weight in self._weights.items():
            gradient, state = gradients[name], self._state[name]
            match self._rules[name]:
                case "muon":
                    apply_muon(
                        weight, gradient, state["momentum_buffer"], learning_rate=muon_rate,
                        momentum=config.momentum, weight_decay=config.weight_decay,
                    )  # fmt: skip
                case "adamw":
                    beta1, beta2 = config.betas
                    adamw(
                        [weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                        [state["step"]], fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
                        lr=adamw_rate, weight_decay=config.weight_decay, eps=1e-8, maximize=False,
                    )  # fmt: skip
                case "adamw8bit":
                    assert self._adamw_8bit is not None
                    self._adamw_8bit.step(
                        weight, gradient, state, learning_rate=adamw_rate, betas=config.betas,
                        weight_decay=config.weight_decay,
                    )  # fmt: skip
                case "sgd":
                    decayed = gradient.add(weight, alpha=config.weight_decay)
                    weight.add_(decayed, alpha=-adamw_rate)

    def read_state(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps, as "weight/field"; it changes with the next step."""
        return {
            f"{name}/{field}": tensor
            for name, fields in self._state.items()
            for field, tensor in fields.items()
        }


def _open_adamw_8bit() -> AdamW8bit:
    try:
        return AdamW8bit()
    except ValueError as error:
        raise UsageError(f"optimizer.name: {error}, or train another run") from None


def _choose_rule(config: Optimizer, name: str, weight: Tensor) -> _Rule:
    if config.name == "muon" and not (weight.ndim in (2, 3) and _is_in_block(name)):
        return "adamw"
    return config.name


def _make_state(rule: _Rule, weight: Tensor) -> dict[str, Tensor]:
    """Return what a rule keeps of a weight, under the names of its library."""
    weight = weight.detach()
    match rule:
        case "muon":
            return {"momentum_buffer": torch.zeros_like(weight)}
        case "adamw":
            return {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        case "adamw8bit":
            return make_state(weight)
        case "sgd":
            return {}


def count_state_bytes(config: Optimizer, weights: Mapping[str, Tensor]) -> int:
    """Return the memory of what an optimizer keeps of weights that are on the meta device."""
    return sum(
        one.nbytes
        for name, weight in weights.items()
        for one in _make_state(_choose_rule(config, name, weight), weight.float()).values()
    )


def _is_in_block(name: str) -> bool:
    """Return whether a weight lies in a list of blocks, as its name has an index then."""
    return any(part.isdigit() for part in name.split("."))


def compute_clip_factor(squared_norm: float, clip_norm: float) -> float:
    """Return the factor that shortens a gradient to the norm, as torch's clip_grad_norm_ does."""
    return min(clip_norm / (math.sqrt(squared_norm) + 1e-6), 1.0)
