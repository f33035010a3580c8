"""Attention with linear biases: positions as a penalty on distance, without rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """The slopes of a model's heads (Press, Smith and Lewis, 2021, arXiv:2108.12409).

    Biases grow with the position of the key instead of falling with the distance: softmax cannot
    tell the two apart, and so they are the same for every query. `dtype` is the one in which
    slopes are multiplied with positions, and `scale` multiplies the result.
    """

    slopes_H: Tensor
    scale: float
    dtype: torch.dtype

    @classmethod
    def build(
        cls, num_heads: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Alibi:
        """Return the slopes for a number of heads.

        A power of two gets a geometric series; what is above the last one gets every other slope
        of the series for twice as many.

        >>> Alibi.build(3).slopes_H.tolist()
        [0.0625, 0.00390625, 0.25]
        """
        power = 2 ** math.floor(math.log2(num_heads))
        exponents = [-8 * head / power for head in range(1, power + 1)]
        exponents += [-4 * head / power for head in range(1, 2 * (num_heads - power), 2)]
        return cls(torch.tensor([2**exponent for exponent in exponents]), scale, dtype)

    def to(self, device: torch.device) -> Alibi:
        """Return the same slopes on a device."""
        return replace(self, slopes_H=self.slopes_H.to(device))

    def select(self, heads: slice) -> Alibi:
        """Return the slopes of some of the heads."""
        return replace(self, slopes_H=self.slopes_H[heads])

    def append_to(
        self, queries_BHTD: Tensor, keys_BGSD: Tensor, values_BGSD: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values whose scaled products, without biases, have the biases.

        Each key, of the positions from 0 on, has the bias of each of its group's R heads behind its
        own numbers, twice. There the queries of a head have `1 / scale`, in two numbers that add up
        to more digits than one of 16 bits holds. Zeros fill up to a multiple of eight, as torch's
        kernels want it, and values, which they take of the same size; those keep no scores for a
        gradient.
        """
        num_heads, num_groups, num_keys = queries_BHTD.shape[1], *keys_BGSD.shape[1:3]
        group_size = num_heads // num_groups
        biases_GRS = self.draw_biases(0, num_keys).unflatten(0, (num_groups, group_size))
        biases_GSX = biases_GRS.transpose(1, 2).repeat(1, 1, 2).to(keys_BGSD)
        inverse_RR = torch.eye(group_size, device=queries_BHTD.device) / scale
        rough_RR = inverse_RR.to(queries_BHTD.dtype)
        inverse_RX = torch.cat([rough_RR, inverse_RR - rough_RR], dim=1).to(queries_BHTD)
        inverse_H1X = inverse_RX.repeat(num_groups, 1)[:, None]
        queries_BHTY = torch.cat(
            [queries_BHTD, inverse_H1X.expand(*queries_BHTD.shape[:3], -1)], dim=-1
        )
        keys_BGSY = torch.cat([keys_BGSD, biases_GSX.expand(*keys_BGSD.shape[:3], -1)], dim=-1)
        num_zeros = -keys_BGSY.shape[-1] % 8
        return (
            F.pad(queries_BHTY, (0, num_zeros)),
            F.pad(keys_BGSY, (0, num_zeros)),
            F.pad(values_BGSD, (0, 2 * group_size + num_zeros)),
        )

    def draw_biases(self, start: int, stop: int) -> Tensor:
        """Return the biases for the scores of the keys `start:stop`, as float32 [H, S]."""
        positions_S = torch.arange(start, stop, device=self.slopes_H.device).to(self.dtype)
        biases_HS = self.slopes_H.to(self.dtype)[:, None] * positions_S
        return biases_HS.to(torch.float32).mul_(self.scale)
