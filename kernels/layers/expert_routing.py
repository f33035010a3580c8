"""Which experts compute a row: the router of a block with a mixture of experts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_EXACT_BITS = 53
"""Whole numbers up to this many bits are exact in float64, and so are all sums below that."""

_STORED_BITS = 24
"""The same for float32, in which the weights wait."""


class Router:
    """Scores experts for each row, with the same bits in any batch.

    A float product rounds in an order that depends on the number of rows, and the last bit can
    decide which expert computes a row. Here both sides become whole numbers that are small enough
    for float64 to sum their products exactly in any order; with 4096 inputs they keep 20 bits.
    """

    def __init__(self, weight_EH: Tensor) -> None:
        num_sum_bits = (weight_EH.shape[1] - 1).bit_length()
        self._limit = 2 ** min((_EXACT_BITS - num_sum_bits) // 2, _STORED_BITS)
        whole_EH, self._steps_E1 = self._round(weight_EH)
        self._whole_EH = whole_EH.to(torch.float32)
        self.num_bytes = self._whole_EH.nbytes + self._steps_E1.nbytes

    def __call__(
        self, hidden_NH: Tensor, num_chosen: int, *, is_normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of each row and their shares in its result, both [N, K].

        Shares are probabilities over all experts, or over the chosen ones if `is_normalized`.
        """
        scores_NE = cast(Tensor, _Scores.apply(hidden_NH, self))
        shares_NK, experts_NK = scores_NE.softmax(dim=-1).topk(num_chosen, dim=-1)
        if is_normalized:
            shares_NK = shares_NK / shares_NK.sum(dim=-1, keepdim=True)
        return experts_NK, shares_NK

    def score(self, hidden_NH: Tensor) -> Tensor:
        """Return the scores of the experts for each row, as float32 [N, E]."""
        whole_NH, steps_N1 = self._round(hidden_NH)
        sums_NE = whole_NH @ self._whole_EH.to(torch.float64).t()
        return (sums_NE * steps_N1 * self._steps_E1.t()).to(torch.float32)

    def differentiate(self, grads_NE: Tensor) -> Tensor:
        """Return the gradients of the rows, as float32, from those of their scores."""
        return grads_NE @ (self._whole_EH * self._steps_E1.to(torch.float32))

    def _round(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row as whole numbers in float64, and the step that they count."""
        rows = rows.to(torch.float64)
        steps = rows.abs().amax(dim=1, keepdim=True) / self._limit
        # A row of zeros would divide 0 by 0.
        steps.clamp_min_(torch.finfo(torch.float32).tiny)
        return (rows / steps).round_(), steps


class _Scores(torch.autograd.Function):
    """Scores under autograd, for which rounding does nothing."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, router: Router) -> Tensor:
        ctx.router, ctx.dtype = router, hidden_NH.dtype
        return router.score(hidden_NH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.router.differentiate(grads[0]).to(ctx.dtype), None
