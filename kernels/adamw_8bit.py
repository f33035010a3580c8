"""AdamW whose moments are kept in 8 bits (Dettmers and others, 2022, arXiv:2110.02861), by
bitsandbytes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 256
"""Numbers of a moment that share a scale."""

SMALLEST_SIZE = 4096
"""Weights with fewer numbers keep moments in 32 bits, as bitsandbytes' own optimizers have it."""

_NUMBERS_AT_ONCE = 2**20
"""A step takes moments in float32 for so many numbers of a weight."""


def make_state(weight: Tensor) -> dict[str, Tensor]:
    """Return what AdamW keeps of a weight before its first step, under bitsandbytes' names."""
    step = torch.zeros((), dtype=torch.float32)
    if weight.numel() < SMALLEST_SIZE:
        return {
            "step": step,
            "state1": torch.zeros_like(weight),
            "state2": torch.zeros_like(weight),
        }
    num_blocks = -(-weight.numel() // BLOCK_SIZE)
    return {
        "step": step,
        "state1": torch.zeros_like(weight, dtype=torch.uint8),
        "state2": torch.zeros_like(weight, dtype=torch.uint8),
        "absmax1": weight.new_zeros(num_blocks),
        "absmax2": weight.new_zeros(num_blocks),
    }


class AdamW8bit:
    """The rule of `bitsandbytes.optim.AdamW8bit`, with its state in the hands of the caller.

    Raises ValueError where bitsandbytes is missing, or has no such rule for CPUs.
    """

    def __init__(self) -> None:
        self._functions: Any = _load_library().functional
        self._signed_map: Tensor = self._functions.create_dynamic_map(signed=True)
        self._unsigned_map: Tensor = self._functions.create_dynamic_map(signed=False)
        weight = torch.zeros(SMALLEST_SIZE)
        try:
            self.step(
                weight, torch.zeros_like(weight), make_state(weight), learning_rate=0.0,
                betas=(0.0, 0.0), weight_decay=0.0,
            )  # fmt: skip
        except RuntimeError as error:
            raise ValueError(
                "8-bit AdamW on a CPU needs bitsandbytes 0.50 or later: "
                "pip install 'bitsandbytes>=0.50'"
            ) from error

    def step(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        epsilon: float = 1e-8,
    ) -> None:
        """Update a weight and its state in place. All tensors are contiguous."""
        state["step"] += 1
        number = int(state["step"])
        moments = state["state1"].view(-1), state["state2"].view(-1)
        weight, gradient = weight.view(-1), gradient.view(-1)
        if "absmax1" not in state:
            self._functions.optimizer_update_32bit(
                "adam", gradient, weight, moments[0], betas[0], epsilon, number, learning_rate,
                moments[1], betas[1], weight_decay=weight_decay,
            )  # fmt: skip
            return
        for start in range(0, weight.numel(), _NUMBERS_AT_ONCE):
            some = slice(start, start + _NUMBERS_AT_ONCE)
            blocks = slice(start // BLOCK_SIZE, (start + _NUMBERS_AT_ONCE) // BLOCK_SIZE)
            self._functions.optimizer_update_8bit_blockwise(
                "adam", gradient[some], weight[some], moments[0][some], moments[1][some],
                *betas, 0.0, 0.0, epsilon, number, learning_rate, self._signed_map,
                self._unsigned_map, state["absmax1"][blocks], state["absmax2"][blocks],
                weight_decay=weight_decay,
            )  # fmt: skip


def _load_library() -> Any:
    """Import bitsandbytes, which takes half a second, and has no types.

    On processors with bf16, it warns that it looked in vain for a product of weights in 4 bits.
    """
    logger = logging.getLogger("bitsandbytes")
    level_before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        message = "8-bit AdamW needs bitsandbytes: pip install 'bitsandbytes>=0.50'"
        raise ValueError(message) from error
    finally:
        logger.setLevel(level_before)
