"""The tensors of a pass in pieces: honest ones come together, anything else is refused."""

from dataclasses import replace

import pytest
from wire_messages import ADAPTED, PASS, PASS_ID

from shoal.protocol import limits
from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.messages.passes import (
    PassKind,
    PassPiece,
    PiecesReader,
    Slot,
    choose_answer_dtype,
    cut_vectors,
    list_answer_slots,
    list_question_slots,
)
from shoal.protocol.tensors import WireDtype, WireTensor, compute_num_bytes

WIDTH = 1024
NUM_VECTORS = 2500  # three pieces in bfloat16


def make_pieces(slot: Slot, num_vectors: int, dtype: WireDtype = WireDtype.BF16) -> list[PassPiece]:
    return [
        PassPiece(PASS_ID, slot, piece.start, make_vectors(len(piece), dtype))
        for piece in cut_vectors(num_vectors, dtype, WIDTH)
    ]


def make_vectors(number: int, dtype: WireDtype = WireDtype.BF16, width: int = WIDTH) -> WireTensor:
    num_bytes = compute_num_bytes(dtype, 1, number, width)
    return WireTensor(dtype, 1, number, width, bytes(num_bytes))


def test_a_pass_forward_has_inputs_and_outputs() -> None:
    assert list_question_slots(PASS) == {Slot.HIDDEN: 14}
    assert list_answer_slots(PASS) == {Slot.HIDDEN: 14}


def test_a_pass_backward_has_gradients_of_deep_prompts() -> None:
    asked = replace(PASS, kind=PassKind.BACKWARD, prompt_rows=1, prompt_tokens=5)

    slots = {Slot.HIDDEN: 14, Slot.GRADIENTS: 14, Slot.PROMPTS: len(PASS.span) * 5}
    assert list_question_slots(asked) == slots
    assert list_answer_slots(asked) == {Slot.HIDDEN: 14, Slot.PROMPTS: slots[Slot.PROMPTS]}
    assert list_answer_slots(replace(asked, kind=PassKind.FORWARD)) == {Slot.HIDDEN: 14}


def test_gradients_of_adapters_are_answered_where_they_are_wanted() -> None:
    slots = {Slot.HIDDEN: 14, Slot.ADAPTERS: 3}
    assert list_answer_slots(replace(ADAPTED, adapter_vectors=3)) == slots
    assert list_answer_slots(ADAPTED) == {Slot.HIDDEN: 14}
    assert Slot.ADAPTERS not in list_question_slots(replace(ADAPTED, adapter_vectors=3))


@pytest.mark.parametrize("dtype", WireDtype)
def test_gradients_of_adapters_keep_the_range_of_float32(dtype: WireDtype) -> None:
    asked = replace(ADAPTED, dtype=dtype)

    assert choose_answer_dtype(asked, Slot.HIDDEN) is dtype
    assert choose_answer_dtype(asked, Slot.ADAPTERS) in (WireDtype.FP32, WireDtype.BF16)


@pytest.mark.parametrize("dtype", WireDtype)
@pytest.mark.parametrize("width", [1, WIDTH, limits.MAX_HIDDEN_SIZE])
def test_every_piece_fits_into_a_frame(dtype: WireDtype, width: int) -> None:
    pieces = list(cut_vectors(limits.MAX_PASS_TOKENS, dtype, width))

    assert [vector for piece in pieces for vector in piece] == [*range(limits.MAX_PASS_TOKENS)]
    largest = compute_num_bytes(dtype, 1, len(pieces[0]), width)
    assert largest < limits.MAX_FRAME_BYTES
    assert len(pieces[0]) <= limits.MAX_STEP_TOKENS


def test_pieces_of_every_slot_come_together() -> None:
    slots = {Slot.HIDDEN: NUM_VECTORS, Slot.PROMPTS: 3}
    reader = PiecesReader(slots, WIDTH)
    pieces = [piece for slot, number in slots.items() for piece in make_pieces(slot, number)]
    assert len(pieces) == 3

    for piece in pieces:
        assert not reader.is_complete
        reader.take(piece)

    assert reader.is_complete
    assert reader.tensors == {
        slot: [piece.tensor for piece in pieces if piece.slot is slot] for slot in slots
    }


def test_slots_may_differ_in_their_dtype_and_pieces_of_one_may_not() -> None:
    reader = PiecesReader({Slot.HIDDEN: NUM_VECTORS, Slot.PROMPTS: 3}, WIDTH)
    first, _ = make_pieces(Slot.HIDDEN, NUM_VECTORS)
    reader.take(first)
    _, other = make_pieces(Slot.HIDDEN, NUM_VECTORS, WireDtype.FP16)

    with pytest.raises(RemoteProtocolError, match="dtype"):
        reader.take(other)


@pytest.mark.parametrize(
    "change",
    [
        {"slot": Slot.GRADIENTS},
        {"slot": Slot.PROMPTS},
        {"offset": 1},
        {"tensor": make_vectors(1)},
        {"tensor": make_vectors(2047)},
        {"tensor": make_vectors(2049)},
        {"tensor": make_vectors(2048, width=WIDTH - 1)},
    ],
    ids="-".join,
)
def test_a_piece_that_is_not_the_next_is_refused(change: dict[str, object]) -> None:
    """Small ones too: a stranger could send one vector at a time, each with a frame around it."""
    reader = PiecesReader({Slot.HIDDEN: NUM_VECTORS, Slot.PROMPTS: 3}, WIDTH)
    first, _ = make_pieces(Slot.HIDDEN, NUM_VECTORS)

    with pytest.raises(RemoteProtocolError, match="a piece of"):
        reader.take(replace(first, **change))  # type: ignore[arg-type]
    reader.take(first)


def test_a_piece_behind_the_last_is_refused() -> None:
    reader = PiecesReader({Slot.HIDDEN: 3}, WIDTH)
    (only,) = make_pieces(Slot.HIDDEN, 3)
    reader.take(only)

    with pytest.raises(RemoteProtocolError, match="where none belongs"):
        reader.take(only)
