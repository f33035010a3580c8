"""What a stranger sends that no honest peer would: refused by its own error, without cost."""

import struct
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from wire_messages import (
    BODIES,
    MODEL,
    ONE_OF_EACH,
    OPEN,
    OUTPUT,
    PARENT,
    SESSION,
    STEP,
    U32,
    WELCOME,
    check_is_canonical,
    decode_or_refuse,
    make_tensor,
    name_shortly,
    patch,
    with_control,
)

from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode, RemoteProtocolError
from shoal.protocol.messages.codec import CODECS, HEADER_BYTES, decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.passes import PassPiece
from shoal.protocol.messages.reverse_connections import Offer, Parked
from shoal.protocol.messages.runs import RunPiece
from shoal.protocol.messages.session import (
    Close,
    Declined,
    Gap,
    Hello,
    Open,
    Opened,
    Output,
    Step,
    Welcome,
)
from shoal.protocol.tensors import KVFormat, WireDtype


def list_accepted(frames: Iterable[tuple[Any, bytes]]) -> list[Any]:
    """Return the names of the frames that are not refused."""
    return [name for name, frame in frames if decode_or_refuse(frame) is not None]


def list_all_but(*excluded: type[Message]) -> list[type[Message]]:
    return [message for message in ONE_OF_EACH if message not in excluded]


@pytest.mark.parametrize("kind", [Hello, Step, Close])
def test_damaged_header_is_refused(kind: type[Message]) -> None:
    frame = encode_frame(ONE_OF_EACH[kind])
    damages: list[dict[str, Any]] = [
        {"magic": b"SH"},
        {"version": 0},
        {"version": 2},
        {"version": 255},
        {"kind": 0},
        {"kind": max(CODECS) + 1},
        {"kind": 255},
        *({"flags": 1 << bit} for bit in range(3, 16)),
        {"flags": 0xFFFF},
        {"control_length": U32},
        {"control_length": limits.MAX_CONTROL_BYTES + 1},
        {"tensor_length": U32},
        {"tensor_length": 2**31},
    ]

    assert list_accepted((changes, patch(frame, **changes)) for changes in damages) == []


@pytest.mark.parametrize("kind", [Step, Output])
def test_contradicting_tensor_header_is_refused(kind: type[Message]) -> None:
    frame = encode_frame(ONE_OF_EACH[kind])
    contradictions: list[dict[str, Any]] = [
        {"dtype": 0},
        {"dtype": 4},
        {"dtype": 255},
        {"dtype": int(WireDtype.FP32)},
        {"codec": 0},
        {"codec": 2},
        {"codec": 255},
        {"rows": 0},
        {"tokens": 0},
        {"width": 0},
        {"rows": 2},
        {"tokens": 2},
        {"width": 7},
        {"rows": U32},
        {"tokens": U32},
        {"width": U32},
        {"rows": 257, "tokens": 4097, "width": 65537},
        {"rows": 2**16, "tokens": 2**16, "width": 8},  # the product is 2**35, or 8 in 32 bits
        {"session": bytes(16)},
        *({"position": number % 2**32} for number in (-1, -(2**31), -(2**20))),
        {"position": limits.MAX_SESSION_TOKENS + 1},
    ]

    assert list_accepted((changes, patch(frame, **changes)) for changes in contradictions) == []


USED = {
    Hello: set(),
    Welcome: set(),
    Open: {"session", "epoch"},
    Opened: {"session", "epoch"},
    Gap: {"session", "epoch", "sequence", "position"},
    Close: {"session", "epoch"},
    Declined: {"session", "sequence"},
    Offer: set(),
    Parked: set(),
}


@pytest.mark.parametrize("kind", list(USED))
def test_fields_without_a_use_have_to_be_zero(kind: type[Message]) -> None:
    frame = encode_frame(ONE_OF_EACH[kind])
    values = {"session": SESSION, "epoch": 1, "sequence": 1, "position": 1, "flags": 1, "dtype": 1}
    values |= {"codec": 1, "rows": 1, "tokens": 1, "width": 1}

    for name in set(values) - USED[kind]:
        with pytest.raises(RemoteProtocolError):
            decode_frame(patch(frame, **{name: values[name]}))


@pytest.mark.parametrize("kind", [Gap, Close, Parked])
def test_messages_without_a_control_part_refuse_one(kind: type[Message]) -> None:
    with pytest.raises(RemoteProtocolError, match="control"):
        decode_frame(with_control(ONE_OF_EACH[kind], b"\x08\x01"))


def test_missing_session_is_refused() -> None:
    for kind in list_all_but(Hello, Welcome, Offer, Parked):
        frame = patch(encode_frame(ONE_OF_EACH[kind]), session=bytes(16))
        with pytest.raises(RemoteProtocolError, match="session"):
            pytest.fail(f"accepted: {decode_frame(frame)}")


def test_control_messages_carry_no_tensor() -> None:
    for kind in list_all_but(Step, Output, PassPiece, RunPiece):
        frame = encode_frame(ONE_OF_EACH[kind]) + bytes(16)
        frame = patch(frame, tensor_length=16, rows=1, tokens=1, width=8, dtype=3, codec=1)
        with pytest.raises(RemoteProtocolError, match="no tensor"):
            pytest.fail(f"accepted: {decode_frame(frame)}")


def float_body(number: int, value: float, form: str = "<f") -> bytes:
    """Return a protobuf field with a fixed-size number."""
    return bytes([number << 3 | (5 if form == "<f" else 1)]) + struct.pack(form, value)


NOT_SECONDS = [float("nan"), float("inf"), float("-inf"), -1.0, -1e-30]


@pytest.mark.parametrize("value", NOT_SECONDS)
def test_impossible_durations_are_refused(value: float) -> None:
    declined = BODIES[Declined](code=1, whole_stream=False).SerializeToString()
    welcome = BODIES[Welcome](version=1, model_id=MODEL, span_stop=4).SerializeToString()
    frames = [
        with_control(ONE_OF_EACH[Opened], float_body(1, value)),
        with_control(OUTPUT, float_body(1, value)),
        with_control(OUTPUT, float_body(2, value)),
        with_control(ONE_OF_EACH[Declined], declined + float_body(3, value)),
        with_control(WELCOME, welcome + float_body(7, value, "<d")),
    ]

    for frame in frames:
        with pytest.raises(RemoteProtocolError, match="duration"):
            decode_frame(frame)


@pytest.mark.parametrize(
    "row_map", [[0], [0, 1, 0], [0, 2], [2, 0], [0, U32], [0] * 257, [0] * 60_000]
)
def test_row_map_that_does_not_fit_is_refused(row_map: list[int]) -> None:
    step = Step(SESSION, 1, 2, 3, make_tensor(2, 1, 4))
    body = BODIES[Step](row_map=row_map).SerializeToString()

    with pytest.raises(RemoteProtocolError, match="row map"):
        decode_frame(with_control(step, body))


def test_control_part_of_a_step_may_hold_nothing_that_we_know() -> None:
    unknown_field_only = bytes([9 << 3, 1])

    assert decode_frame(with_control(STEP, unknown_field_only)) == STEP


def make_open_body(**changes: Any) -> Any:
    sound: dict[str, Any] = {"span_stop": 4, "num_rows": 1, "max_tokens": 1, "dtype": 1}
    return BODIES[Open](model_id=MODEL, **{**sound, **changes})


def test_body_without_a_kv_format_is_sound() -> None:
    opening = decode_frame(with_control(OPEN, make_open_body().SerializeToString()))

    assert isinstance(opening, Open)
    assert opening.kv_format is KVFormat.FLOAT


BAD_BODIES: list[tuple[type[Message], Any]] = [
    (Hello, BODIES[Hello](software="x" * 513)),
    (Hello, BODIES[Hello](client=b"x")),
    (Hello, BODIES[Hello](client=bytes(60_000))),
    (Hello, BODIES[Hello](software="\x1b]0;title\x07")),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_start=4, span_stop=4)),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_start=5, span_stop=4)),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_stop=limits.MAX_BLOCKS + 1)),
    (Welcome, BODIES[Welcome](model_id=MODEL[1:], span_stop=4)),
    (Welcome, BODIES[Welcome](model_id="../" * 10 + "ab", span_stop=4)),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_stop=4, peer_id="x" * 513)),
    (Open, BODIES[Open]()),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=0, max_tokens=1, dtype=1)),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=257, max_tokens=1, dtype=1)),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=1, max_tokens=0, dtype=1)),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=1, max_tokens=U32, dtype=1)),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=1, max_tokens=1, dtype=0)),
    (Open, BODIES[Open](model_id=MODEL, span_stop=4, num_rows=1, max_tokens=1, dtype=9)),
    *(
        (Open, make_open_body(max_tokens=9, parent=parent, prefix_tokens=prefix_tokens))
        for parent, prefix_tokens in (
            (PARENT, 0),
            (PARENT, 10),
            (PARENT, U32),
            (b"", 1),
            (bytes(16), 1),
            (PARENT[1:], 1),
            (PARENT + b"!", 1),
            (SESSION, 1),  # of itself
        )
    ),
    (Open, make_open_body(kv_format=2)),
    (Open, make_open_body(kv_format=U32)),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_stop=4, nonce=bytes(31))),
    (Welcome, BODIES[Welcome](model_id=MODEL, span_stop=4, nonce=bytes(33))),
    (Offer, BODIES[Offer](peer_id="12D3KooW")),
    (Offer, BODIES[Offer](peer_id="12D3KooW", signature=bytes(63))),
    (Offer, BODIES[Offer](peer_id="12D3KooW", signature=bytes(60_000))),
    (Offer, BODIES[Offer](peer_id="x" * 513, signature=bytes(64))),
    (Declined, BODIES[Declined](code=0)),
    (Declined, BODIES[Declined](code=max(ErrorCode) + 1)),
    (Declined, BODIES[Declined](code=U32)),
    (Declined, BODIES[Declined](code=1, detail="x" * 513)),
    (Declined, BODIES[Declined](code=1, detail="\x1b[2J")),
    (Declined, BODIES[Declined](code=1, whole_stream=True)),  # ... and names a session
]


def test_control_values_out_of_bounds_are_refused() -> None:
    frames = (
        ((kind, body), with_control(ONE_OF_EACH[kind], body.SerializeToString()))
        for kind, body in BAD_BODIES
    )

    assert list_accepted(frames) == []


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\x0f",  # a text of 4 GB
        b"\x1a\x02\xff\xfe",  # text that is not UTF-8, in field 3
        b"\x0a\x02\xff\xfe",  # the same in field 1
        b"\x12\x02\xff\xfe",  # and in field 2
        b"\x0b" * 5000,  # groups within groups
        b"\x80" * 11 + b"\x01",
    ],
    ids=name_shortly,
)
def test_invalid_protobuf_is_refused(body: bytes) -> None:
    for kind in list_all_but(Gap, Close):
        message = decode_or_refuse(with_control(ONE_OF_EACH[kind], body))

        if message is not None:  # a field of another number, which is skipped
            check_is_canonical(message)


def test_invalid_protobuf_names_the_message() -> None:
    with pytest.raises(RemoteProtocolError, match="OPENED"):
        decode_frame(with_control(ONE_OF_EACH[Opened], b"\xff"))


def test_fields_of_a_newer_version_are_skipped() -> None:
    frame = encode_frame(ONE_OF_EACH[Opened])
    body = frame[HEADER_BYTES:] + bytes([15 << 3, 1])

    assert decode_frame(with_control(ONE_OF_EACH[Opened], body)) == decode_frame(frame)


@pytest.mark.parametrize("num_bytes", [0, 1, 2, HEADER_BYTES - 1, limits.MAX_FRAME_BYTES + 1])
def test_frame_of_impossible_size_is_refused(num_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="sizes"):
        decode_frame(b"sh" + bytes(num_bytes) if num_bytes > 100 else bytes(num_bytes))


def test_huge_declared_lengths_allocate_nothing() -> None:
    frames = [
        patch(encode_frame(STEP), tensor_length=U32, rows=256, tokens=4096, width=2**16),
        patch(encode_frame(STEP), tensor_length=U32 - 100, control_length=U32),
        with_control(STEP, b"\x0a\xff\xff\xff\xff\x0f"),
        with_control(ONE_OF_EACH[Hello], b"\x1a\xff\xff\xff\xff\x07"),
    ]
    for frame in frames:
        decode_or_refuse(frame)  # what is imported and cached on the way does not count

    tracemalloc.start()
    try:
        assert [decode_or_refuse(frame) for frame in frames] == [None] * len(frames)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 50_000
