"""The tensors of a pass: which there are, how large, and how they travel in pieces."""

from collections.abc import Iterator, Mapping

from .. import limits
from ..errors import RemoteProtocolError
from ..tensors import WireDtype, WireTensor, compute_num_bytes
from .session import Pass, PassKind, PassPiece, Slot

_PIECE_BYTES = 4 * 2**20
"""What a piece has at most: pieces of several streams share a connection's way."""


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
