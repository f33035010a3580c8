"""LoRA adapters as they are applied: matrices beside the linears of our blocks.

Tensor suffixes: N tokens, R rank, I input and O output features of the linear that PEFT knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ....kernels.linear.linear import Linear
from ....kernels.linear.low_rank import add_low_rank
from ....protocol.spans import Span

LinearKey = tuple[int, str]
"""A block, and the name of one of our linears in it: "query_key_value", "gate_up", …"""


@dataclass(frozen=True)
class AdapterPart:
    """The matrices of one linear, which add `up_OR @ (down_RI @ input) * scale` to its outputs.

    `module` is the name that the checkpoint has for the linear that PEFT knows. Its outputs are
    those in `outputs` of our linear, in the order `order_O` if that differs.
    """

    module: str
    outputs: slice
    down_RI: Tensor
    up_OR: Tensor
    scale: float
    order_O: Tensor | None

    @property
    def row_cost(self) -> int:
        """The cost of a token, see `Pauses`."""
        return (self.down_RI.numel() + self.up_OR.numel()) * torch.float32.itemsize

    def compute(self, hidden_NI: Tensor) -> Tensor:
        """Return what is added for these tokens."""
        up_OR = self.up_OR if self.order_O is None else self.up_OR[self.order_O]
        down_RI, up_OR = self.down_RI.to(hidden_NI.dtype), up_OR.to(hidden_NI.dtype)
        return (hidden_NI @ down_RI.t()) @ up_OR.t() * self.scale

    def add_to(self, hidden_NI: Tensor, target_NO: Tensor) -> None:
        """Add the same in place: on the CPU with the same bits for each token, whatever others
        there are.
        """
        if hidden_NI.device.type != "cpu":
            target_NO += self.compute(hidden_NI)
            return
        add_low_rank(hidden_NI, self.down_RI, self.up_OR, self.scale, target_NO, self.order_O)

    def open(self, torch_device: torch.device, has_gradients: bool) -> AdapterPart:
        """Return the part on a device; with gradients, as float32 copies that accumulate them."""
        if not has_gradients:
            return replace(
                self, down_RI=self.down_RI.to(torch_device), up_OR=self.up_OR.to(torch_device)
            )
        down_RI, up_OR = (
            matrix.to(torch_device, torch.float32, copy=True).requires_grad_()
            for matrix in (self.down_RI, self.up_OR)
        )
        return replace(self, down_RI=down_RI, up_OR=up_OR)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The part of an adapter that belongs to the blocks of a span."""

    rank: int
    parts: Mapping[LinearKey, tuple[AdapterPart, ...]]

    def move_to(self, torch_device: torch.device) -> Adapter:
        """Return the adapter on a device."""
        return self.open(torch_device, has_gradients=False)

    def open(self, torch_device: torch.device, has_gradients: bool) -> Adapter:
        """Return the adapter on a device; with gradients, float32 copies that accumulate them."""
        opened = {
            key: tuple(part.open(torch_device, has_gradients) for part in parts)
            for key, parts in self.parts.items()
        }
        return Adapter(self.rank, opened)

    def cut(self, span: Span) -> Adapter:
        """Return the part for some of the blocks."""
        return Adapter(
            self.rank, {key: parts for key, parts in self.parts.items() if key[0] in span}
        )

    def bind(
        self, block: int, linears: Mapping[str, Linear]
    ) -> dict[Linear, tuple[AdapterPart, ...]]:
        """Return the parts for each of a block's linears, which are given by name."""
        return {linear: self.parts.get((block, name), ()) for name, linear in linears.items()}

    @cached_property
    def num_numbers(self) -> int:
        """How many numbers its matrices have."""
        parts = [part for parts in self.parts.values() for part in parts]
        return sum(part.down_RI.numel() + part.up_OR.numel() for part in parts)

    @property
    def num_bytes(self) -> int:
        """Memory of its matrices."""
        parts = [part for parts in self.parts.values() for part in parts]
        return sum(part.down_RI.nbytes + part.up_OR.nbytes for part in parts)
