"""The messages of fine-tuning: passes, their tensors, and how these travel in pieces.

A pass needs no session. On a stream of its own the client says `Pass` and sends tensors in
`PassPiece`s; those of the answer come in the same way, and `Passed` ends them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from .. import limits
from ..errors import RemoteProtocolError
from ..ids import AdapterId, ModelId
from ..spans import Span
from ..tensors import WireDtype, WireTensor, check_tensor, compute_num_bytes
from .fields import (
    Body,
    Header,
    HeaderPass,
    Message,
    Record,
    Spread,
    check_adapter,
    check_count,
    check_model_id,
    check_seconds,
    check_span,
    count_to,
    index_below,
    message,
    number_in,
)

_MOST_NUMBERS = 2**32
_MOST_SCALE = 2.0**200
"""Gradients travel times a power of two, so that 16 bits hold them."""

_PIECE_BYTES = 4 * 2**20
"""The largest piece: pieces of several streams share one connection."""


class PassKind(IntEnum):
    """Which way a pass goes through the blocks."""

    FORWARD = 1
    BACKWARD = 2


class Slot(IntEnum):
    """Which tensor of a pass a piece belongs to: vectors of size H, for all rows in turn."""

    HIDDEN = 1
    """The inputs; in the answer the outputs, or the gradients of the inputs."""

    GRADIENTS = 2
    """The gradients of the outputs."""

    PROMPTS = 3
    """The deep prompts of all blocks; in the answer their gradients."""

    ADAPTERS = 4
    """In the answer the gradients of adapters, one number after the other, see `passes`."""


@dataclass(frozen=True, slots=True)
class AdapterRows(Record):
    """The next `num_rows` rows of a batch have this adapter, or none."""

    adapter: Annotated[AdapterId, Body(1, "bytes"), check_adapter]
    num_rows: Annotated[int, Body(2, "uint32")]


@dataclass(frozen=True, slots=True)
class AccumulationOrder(Record):
    """Add the gradients of a pass to a sum, times `scale`, as one part, if it is not in there."""

    number: Annotated[int, Body(1, "uint64"), count_to(_MOST_NUMBERS, "number of a sum")]
    part: Annotated[int, Body(2, "uint32"), count_to(_MOST_NUMBERS - 1, "part of a sum")]
    scale: Annotated[
        float, Body(3, "double"), number_in(1 / _MOST_SCALE, _MOST_SCALE, "scale of gradients")
    ] = 1.0


@message(20)
class Pass(Message):
    """Ask for one pass of a microbatch through some blocks, from position 0 on and without a cache.

    The pieces of its tensors follow, slot by slot. Backward, the peer computes the outputs once
    more: it remembers nothing of the pass forward. Deep prompts are added to the first
    `prompt_tokens` inputs of their block, to each row its own (`prompt_rows` is `num_rows`) or to
    all the same (1). The answer is in `dtype`.

    `adapters` says which rows have which adapter; without, none has one. Backward,
    `adapter_vectors` are those that the gradients of all of them fill; 0: they are not wanted.
    To `accumulate` them, of the one adapter that rows have, is for one that the peer trains.
    Forward, `trains_adapters` says that any of this will be asked for: a peer without memory for it
    declines before it computes anything.
    """

    pass_id: HeaderPass
    kind: Annotated[PassKind, Body(1, "uint32")]
    model_id: Annotated[ModelId, Body(2, "string"), check_model_id]
    span: Annotated[
        Span, Spread({"start": Body(3, "uint32"), "stop": Body(4, "uint32")}), check_span
    ]
    num_rows: Annotated[int, Body(5, "uint32"), count_to(limits.MAX_BATCH_ROWS, "number of rows")]
    num_tokens: Annotated[
        int, Body(6, "uint32"), count_to(limits.MAX_PASS_TOKENS, "number of tokens")
    ]
    dtype: Annotated[WireDtype, Body(7, "uint32")]
    prompt_rows: Annotated[int, Body(8, "uint32")] = 0
    prompt_tokens: Annotated[int, Body(9, "uint32")] = 0
    adapters: Annotated[tuple[AdapterRows, ...], Body(10)] = ()
    adapter_vectors: Annotated[int, Body(11, "uint32")] = 0
    accumulate: Annotated[AccumulationOrder | None, Body(12)] = None
    trains_adapters: Annotated[bool, Body(13, "bool")] = False

    def check(self) -> None:
        """Raise ValueError unless adapters and deep prompts fit the rows of the pass."""
        check_count(self.num_rows * self.num_tokens, limits.MAX_PASS_TOKENS, "size of a pass")
        self._check_adapters()
        rows, tokens = self.prompt_rows, self.prompt_tokens
        if (rows, tokens) == (0, 0):
            return
        if rows not in (1, self.num_rows) or not 0 < tokens <= self.num_tokens:
            raise ValueError(
                f"{rows} rows of {tokens} deep prompts do not fit {self.num_rows} rows of "
                f"{self.num_tokens} tokens"
            )
        num_prompts = len(self.span) * rows * tokens
        check_count(num_prompts, limits.MAX_PASS_PROMPTS, "number of deep prompts")

    def _check_adapters(self) -> None:
        if self.trains_adapters and self.kind is not PassKind.FORWARD:
            raise ValueError("that gradients will be asked for is said on the way there")
        if not self.adapters:
            if self.adapter_vectors or self.accumulate or self.trains_adapters:
                raise ValueError("gradients of adapters are asked for, and there are none")
            return
        num_rows = 0
        for run in self.adapters:
            check_count(run.num_rows, self.num_rows, "number of rows with an adapter")
            num_rows += run.num_rows
        if num_rows != self.num_rows:
            raise ValueError(f"adapters of {num_rows} rows do not fit {self.num_rows} rows")
        is_backward = self.kind is PassKind.BACKWARD
        if self.adapter_vectors:
            bound = limits.MAX_PASS_ADAPTERS if is_backward else 0
            check_count(self.adapter_vectors, bound, "gradients of adapters")
        if self.accumulate is not None:
            names = {run.adapter for run in self.adapters if run.adapter}
            if len(names) != 1 or self.adapter_vectors or not is_backward:
                raise ValueError(
                    "gradients are accumulated of one adapter, on the way back, and not answered"
                )


@message(21)
class PassPiece(Message):
    """Some vectors of one tensor of a pass, `[1, vectors, H]`, from the one at `offset` on."""

    pass_id: HeaderPass
    slot: Annotated[Slot, Header("sequence")]
    offset: Annotated[int, Header("position"), index_below(limits.MAX_PASS_PROMPTS)]
    tensor: Annotated[WireTensor, Header("tensor"), check_tensor]

    def check(self) -> None:
        """Raise ValueError unless the vectors are one row."""
        if self.tensor.rows != 1:
            raise ValueError(f"a piece is one row of vectors, not {self.tensor.rows}")


@message(22)
class Passed(Message):
    """The end of the answer to a pass, and how long the pass waited and computed."""

    pass_id: HeaderPass
    queue_seconds: Annotated[float, Body(1, "float"), check_seconds]
    compute_seconds: Annotated[float, Body(2, "float"), check_seconds]


def list_question_slots(asked: Pass) -> dict[Slot, int]:
    """Return the vectors of each tensor that the client sends, in the order in which it does."""
    slots = {Slot.HIDDEN: asked.num_rows * asked.num_tokens}
    if asked.kind is PassKind.BACKWARD:
        slots[Slot.GRADIENTS] = slots[Slot.HIDDEN]
    return slots | _list_prompts(asked)


def list_answer_slots(asked: Pass) -> dict[Slot, int]:
    """Return the vectors of each tensor of the answer, in order."""
    slots = {Slot.HIDDEN: asked.num_rows * asked.num_tokens}
    if asked.kind is PassKind.FORWARD:
        return slots
    adapters = {Slot.ADAPTERS: asked.adapter_vectors} if asked.adapter_vectors else {}
    return slots | _list_prompts(asked) | adapters


def choose_answer_dtype(asked: Pass, slot: Slot) -> WireDtype:
    """Return what a tensor of the answer travels in.

    Gradients of adapters go into an optimizer: as far as they are not float32, they need its range
    of exponents.
    """
    if slot is Slot.ADAPTERS and asked.dtype is not WireDtype.FP32:
        return WireDtype.BF16
    return asked.dtype


def _list_prompts(asked: Pass) -> dict[Slot, int]:
    num_prompts = len(asked.span) * asked.prompt_rows * asked.prompt_tokens
    return {Slot.PROMPTS: num_prompts} if num_prompts else {}


def cut_vectors(num_vectors: int, dtype: WireDtype, width: int) -> Iterator[range]:
    """Yield the vectors of each piece.

    >>> [len(piece) for piece in cut_vectors(5000, WireDtype.BF16, 64)]
    [4096, 904]
    """
    step = _count_vectors(dtype, width)
    for start in range(0, num_vectors, step):
        yield range(start, min(start + step, num_vectors))


def _count_vectors(dtype: WireDtype, width: int) -> int:
    """Return how many vectors a piece has that is not the last one."""
    return max(
        1, min(_PIECE_BYTES // compute_num_bytes(dtype, 1, 1, width), limits.MAX_STEP_TOKENS)
    )


class PiecesReader:
    """Takes the pieces of a pass: slot by slot, and of each those that `cut_vectors` makes."""

    def __init__(self, slots: Mapping[Slot, int], width: int) -> None:
        """Expect so many vectors of each slot, `width` numbers each."""
        self._missing = dict(slots)
        self._slots = slots
        self._width = width
        self.tensors: dict[Slot, list[WireTensor]] = {slot: [] for slot in slots}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing any more."""
        return not self._missing

    def take(self, piece: PassPiece) -> None:
        """Take the next piece. Raises RemoteProtocolError for any other."""
        slot = next(iter(self._missing), None)
        if slot is None or slot is not piece.slot:
            raise RemoteProtocolError(f"a piece of {piece.slot.name} came where none belongs")
        tensor, num_missing = piece.tensor, self._missing[slot]
        num_expected = min(num_missing, _count_vectors(tensor.dtype, self._width))
        place, shape = self._slots[slot] - num_missing, (1, num_expected, self._width)
        if (piece.offset, tensor.shape) != (place, shape):
            raise RemoteProtocolError(
                f"a piece of {slot.name} has shape {tensor.shape} at {piece.offset}; the next one "
                f"has {shape} at {place}"
            )
        taken = self.tensors[slot]
        if taken and tensor.dtype is not taken[0].dtype:
            raise RemoteProtocolError(f"the pieces of {slot.name} differ in their dtype")
        taken.append(tensor)
        self._missing[slot] -= num_expected
        if not self._missing[slot]:
            del self._missing[slot]
