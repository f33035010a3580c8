"""Applies the gradient of an update to the weights of a span.

Every step is a function of weights, gradient and optimizer state alone, so that replicas that start
equal stay equal. Muon takes each matrix whole, and a span holds its matrices whole, so replicas
exchange nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ....protocol.runs.training_run import Optimizer

_NUMBERS_AT_ONCE = 2**14
"""Sums of so many numbers are never divided among threads, which would round them otherwise."""


class SpanOptimizer:
    """The optimizer of a span's weights, which are given by their names in a checkpoint.

    Muon updates the matrices of blocks. Embedding, head, norms and biases are AdamW's under Muon,
    too (Jordan et al., 2024). The experts of a block may be one weight of three dimensions, which
    Muon takes as that many matrices.
    """

    def __init__(self, config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        """Each with its highest learning rate."""
        self._pieces = dict[str, list[Tensor]]()
        """Of each weight, what its optimizer updates: the weight, or its matrices."""
        matrices, others = list[Tensor](), list[Tensor]()
        for name, weight in parameters.items():
            is_matrix = config.name == "muon" and weight.ndim in (2, 3) and _is_in_block(name)
            is_stack = is_matrix and weight.ndim == 3
            self._pieces[name] = list(weight.detach()) if is_stack else [weight]
            (matrices if is_matrix else others).extend(self._pieces[name])
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._optimizers.append((muon, config.learning_rate))
        if others:
            rate = config.learning_rate
            if config.name == "muon" and config.adamw_learning_rate is not None:
                rate = config.adamw_learning_rate
            self._optimizers.append((_make_other(config, others, rate), rate))
        for optimizer, _ in self._optimizers:
            _fill_state(optimizer)

    def step(self, gradients: Mapping[str, Tensor], learning_rate_factor: float) -> None:
        """Update the weights with these gradients, at a factor of the highest learning rate."""
        for name, pieces in self._pieces.items():
            gradient = gradients[name]
            for piece, own in zip(
                pieces, [gradient] if len(pieces) == 1 else gradient, strict=True
            ):
                piece.grad = own.view_as(piece)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate_factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def read_state(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps, as "weight/field"; it changes with the next step."""
        return {
            f"{name}/{field}" if len(pieces) == 1 else f"{name}/{index}/{field}": tensor
            for name, pieces in self._pieces.items()
            for index, piece in enumerate(pieces)
            for optimizer, _ in self._optimizers
            for field, tensor in optimizer.state.get(piece, {}).items()
        }


def _make_other(config: Optimizer, weights: list[Tensor], rate: float) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(weights, lr=rate, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        weights, lr=rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the zeros now that torch makes in the first step, so that they can be replaced."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if isinstance(optimizer, torch.optim.Muon):
                optimizer.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
            elif isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }


def _is_in_block(name: str) -> bool:
    """Return whether a weight lies in a list of blocks, as its name has an index then."""
    return any(part.isdigit() for part in name.split("."))


def measure_norms(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the squared norm of each gradient, whatever number of threads computes it."""
    return {
        name: math.fsum(
            float(piece.double().square().sum())
            for piece in gradient.flatten().split(_NUMBERS_AT_ONCE)
        )
        for name, gradient in gradients.items()
    }


def compute_clip_factor(squared_norms: Iterable[float], clip_norm: float) -> float:
    """Return the factor that shortens a gradient to the norm; its parts may come in any order.

    As `torch.nn.utils.clip_grad_norm_` does.
    """
    return min(clip_norm / (math.sqrt(math.fsum(squared_norms)) + 1e-6), 1.0)
