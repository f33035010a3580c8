"""LoRA adapters in the format of PEFT: read from a stranger's bytes, and laid beside our linears.

Only `adapter_config.json` and safetensors are read; whatever does not fit the model is refused by
name. Dropout is not applied here.

Tensor suffixes: R rank, I input and O output features of the linear that PEFT knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.linear.linear import Linear
from ....models.specs.model_spec import FusedOrder, MlpKind, ModelSpec
from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.messages.lora_config import DOWN, PREFIX, UP, parse_lora_config
from ....protocol.spans import Span
from .adapter_file import AdapterFile, refuse

MAX_CONFIG_BYTES = 2**16

_NUMBERS_AT_ONCE = 2**18
"""As many as stay in a core's cache."""

Parts = tuple["AdapterPart", ...]

Place = tuple[int, str]
"""A block, and the name of one of our linears in it: "query_key_value", "gate_up", …"""


@dataclass(frozen=True)
class AdapterPart:
    """What is added to some outputs of a linear: `up_OR @ (down_RI @ input) * scale`.

    `module` is what the checkpoint calls the linear that PEFT knows. Its outputs are those of ours
    in `outputs`, in the order of `order_O` if that is not the same.
    """

    module: str
    outputs: slice
    down_RI: Tensor
    up_OR: Tensor
    scale: float
    order_O: Tensor | None

    def compute(self, hidden_NI: Tensor) -> Tensor:
        """Return what is added for these rows."""
        up_OR = self.up_OR if self.order_O is None else self.up_OR[self.order_O]
        down_RI, up_OR = self.down_RI.to(hidden_NI.dtype), up_OR.to(hidden_NI.dtype)
        return (hidden_NI @ down_RI.t()) @ up_OR.t() * self.scale

    def compute_apart(self, hidden_NI: Tensor) -> Tensor:
        """Return the same for each row to the bit, whatever other rows there are.

        On the CPU, where products of matrices depend on how many rows there are, and on where they
        lie in memory.
        """
        if hidden_NI.device.type != "cpu":
            return self.compute(hidden_NI)
        up_OR = self.up_OR if self.order_O is None else self.up_OR[self.order_O]
        hidden_NR = _multiply_apart(hidden_NI.float(), self.down_RI.float())
        return (_multiply_apart(hidden_NR, up_OR.float()) * self.scale).to(hidden_NI.dtype)

    def open(self, place: torch.device, has_gradients: bool) -> AdapterPart:
        """Return the part on a device; for gradients with copies in float32 that gather them."""
        if not has_gradients:
            return replace(self, down_RI=self.down_RI.to(place), up_OR=self.up_OR.to(place))
        down_RI, up_OR = (
            matrix.to(place, torch.float32, copy=True).requires_grad_()
            for matrix in (self.down_RI, self.up_OR)
        )
        return replace(self, down_RI=down_RI, up_OR=up_OR)

    def named_matrices(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        """Return both matrices by what PEFT calls them."""
        name = PREFIX + self.module
        return (name + DOWN, self.down_RI), (name + UP, self.up_OR)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The part of an adapter that belongs to the blocks of a span."""

    rank: int
    parts: Mapping[Place, tuple[AdapterPart, ...]]

    def move_to(self, place: torch.device) -> Adapter:
        """Return it on a device."""
        moved = {
            where: tuple(part.open(place, has_gradients=False) for part in parts)
            for where, parts in self.parts.items()
        }
        return Adapter(self.rank, moved)

    def cut(self, span: Span) -> Adapter:
        """Return what belongs to some of the blocks."""
        return Adapter(
            self.rank, {place: parts for place, parts in self.parts.items() if place[0] in span}
        )

    def bind(self, block: int, linears: Mapping[str, Linear]) -> dict[Linear, Parts]:
        """Return what changes the linears of a block, which are known by their places."""
        return {linear: self.parts.get((block, name), ()) for name, linear in linears.items()}

    @property
    def num_numbers(self) -> int:
        """How many numbers its matrices have."""
        parts = [part for place in self.parts.values() for part in place]
        return sum(part.down_RI.numel() + part.up_OR.numel() for part in parts)

    @property
    def num_bytes(self) -> int:
        """Memory of its matrices."""
        parts = [part for place in self.parts.values() for part in place]
        return sum(part.down_RI.nbytes + part.up_OR.nbytes for part in parts)


@dataclass(frozen=True)
class _Target:
    """A linear as the checkpoint knows it, and where it is in ours."""

    place: Place
    outputs: slice
    num_inputs: int
    order_O: Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """How many inputs and outputs it has."""
        return self.num_inputs, self.outputs.stop - self.outputs.start


def read_adapter(
    config: bytes, tensors: bytes, spec: ModelSpec, span: Span, max_bytes: int
) -> Adapter:
    """Return what an adapter has for a span; raises RefusedError that says what does not fit.

    `max_bytes` bounds both files together, before either is looked into.
    """
    if len(config) > MAX_CONFIG_BYTES or len(config) + len(tensors) > max_bytes:
        raise RefusedError(
            ErrorCode.OUT_OF_MEMORY,
            f"the adapter has {len(config) + len(tensors)} bytes, and {max_bytes} are allowed",
        )
    rank, scale = _read_config(config)
    known = _list_targets(spec)
    file = AdapterFile(tensors, rank, {name: target.sizes for name, target in known.items()})
    parts: dict[Place, list[AdapterPart]] = {}
    for module in file:
        target, (down_RI, up_OR) = known[module], file.read(module)
        if target.place[0] in span:
            part = AdapterPart(module, target.outputs, down_RI, up_OR, scale, target.order_O)
            parts.setdefault(target.place, []).append(part)
    return Adapter(rank, {place: tuple(found) for place, found in parts.items()})


def _multiply_apart(rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the product with each sum taken by itself, in the same order for each row."""
    step = max(1, _NUMBERS_AT_ONCE // weight_OI.numel())
    products = [
        (rows_NI[start : start + step, None] * weight_OI).sum(-1)
        for start in range(0, len(rows_NI), step)
    ]
    return products[0] if len(products) == 1 else torch.cat(products)


def _read_config(config: bytes) -> tuple[int, float]:
    """Return the rank and what the product of both matrices is multiplied by."""
    try:
        known, _ = parse_lora_config(config)
    except ValueError as error:
        raise refuse(str(error)) from None
    return known.rank, known.scale


def _list_targets(spec: ModelSpec) -> dict[str, _Target]:
    """Return every linear of the model's blocks by what its checkpoint may call it."""
    targets: dict[str, _Target] = {}
    for block in range(spec.num_blocks):
        shapes = spec.tensor_shapes(block)
        for slot, members in _list_slots(spec).items():
            if not all(member in shapes for member in members):
                continue  # experts
            start, num_shared_inputs = 0, shapes[members[0]][1]
            is_fused = len(members) > 1 and slot in spec.tensors.names
            for member in members:
                num_outputs, num_inputs = shapes[member]
                stop = start + num_outputs
                if not is_fused:
                    target = _Target((block, slot), slice(start, stop), num_inputs, None)
                    _add(targets, spec, block, member, target)
                start = stop
            if is_fused:
                order_O = _find_order(spec) if slot == "query_key_value" else None
                target = _Target((block, slot), slice(0, start), num_shared_inputs, order_O)
                _add(targets, spec, block, slot, target)
    return targets


def _add(
    targets: dict[str, _Target], spec: ModelSpec, block: int, name: str, target: _Target
) -> None:
    for stored in spec.tensors.list_stored(block, name):
        targets[stored.removesuffix(".weight")] = target


def _list_slots(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return our linears with the block-local names of what is stacked in each."""
    slots: dict[str, tuple[str, ...]] = {
        "query_key_value": ("query", "key", "value"),
        "output": ("output",),
        "down": ("down",),
    }
    if spec.mlp is MlpKind.GATED:
        return slots | {"gate_up": ("gate", "up")}
    return slots | {"up": ("up",)}


def _find_order(spec: ModelSpec) -> Tensor | None:
    """Return where each of our outputs is among those that are stored head by head."""
    if spec.tensors.fused_order is not FusedOrder.BY_GROUP:
        return None
    group_size = spec.num_heads // spec.num_kv_heads + 2
    places_GXD = torch.arange(spec.query_size + 2 * spec.kv_size).view(
        spec.num_kv_heads, group_size, spec.head_dim
    )
    parts = places_GXD[:, :-2], places_GXD[:, -2], places_GXD[:, -1]
    return torch.cat([part.reshape(-1) for part in parts])
