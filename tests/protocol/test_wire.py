"""Frames: everything honest survives the way, everything else is a typed error."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from shoal.protocol.ids import ClientToken, ModelId, PeerId, SessionId
from shoal.protocol.messages import (
    Close,
    Declined,
    Gap,
    Hello,
    Message,
    Open,
    Opened,
    Output,
    Queued,
    Step,
    Welcome,
)
from shoal.protocol.proto import wire_pb2 as pb
from shoal.protocol.spans import Span
from shoal.protocol.tensors import ELEMENT_BYTES, WireCodec, WireDtype, WireTensor
from shoal.protocol.wire import HEADER_BYTES, Kind, decode_frame, encode_frame

SESSION = SessionId(bytes(range(16)))
MODEL = ModelId("0123456789abcdef" * 2)
U32, U64 = 2**32 - 1, 2**64 - 1
TEXT = "ä" * limits.MAX_TEXT_CHARACTERS

# The header, written out once more: what the module's docstring promises to the world.
OFFSETS = {
    "magic": (0, "2s"),
    "version": (2, "B"),
    "kind": (3, "B"),
    "flags": (4, "<H"),
    "dtype": (6, "B"),
    "codec": (7, "B"),
    "session": (8, "16s"),
    "epoch": (24, "<I"),
    "sequence": (28, "<Q"),
    "position": (36, "<I"),
    "rows": (40, "<I"),
    "tokens": (44, "<I"),
    "width": (48, "<I"),
    "control_length": (52, "<I"),
    "tensor_length": (56, "<I"),
}


def make_tensor(
    rows: int = 2, tokens: int = 3, width: int = 4, dtype: WireDtype = WireDtype.BF16
) -> WireTensor:
    data = random.Random(rows).randbytes(rows * tokens * width * ELEMENT_BYTES[dtype])
    return WireTensor(dtype, WireCodec.RAW, rows, tokens, width, data)


STEP = Step(SESSION, 1, 2, 3, make_tensor(1, 1, 8))
OUTPUT = Output(SESSION, 1, 2, 3, make_tensor(1, 1, 8), 0.25, 0.5)
OPEN = Open(SESSION, 1, MODEL, Span(2, 5), 2, 128, WireDtype.BF16)
WELCOME = Welcome(1, "shoal", PeerId("12D3KooW"), MODEL, Span(0, 4), 1_700_000_000.25)

HONEST: list[Message] = [
    Hello(0, 0, ""),
    Hello(1, 7, "shoal 0.1.0"),
    Hello(U32, U32, TEXT),
    Hello(1, 1, "shoal 0.1.0", ClientToken(b"a client's name!")),
    WELCOME,
    Welcome(U32, TEXT, PeerId(TEXT), ModelId("f" * 32), Span(4095, limits.MAX_BLOCKS), 0.0),
    OPEN,
    Open(
        SessionId(b"\xff" * 16),
        U32,
        MODEL,
        Span(0, limits.MAX_BLOCKS),
        limits.MAX_BATCH_ROWS,
        limits.MAX_SESSION_TOKENS,
        WireDtype.FP32,
    ),
    Open(SESSION, 0, MODEL, Span(0, 1), 1, 1, WireDtype.FP16),
    replace(OPEN, max_wait_seconds=12.5),
    Queued(SESSION, 1, 0.0),
    Queued(SESSION, U32, 1234.5),
    Opened(SESSION, 1, 0.5, 1000),
    Opened(SESSION, U32, 0.0, U64),
    STEP,
    Step(SESSION, 0, 0, 0, make_tensor(), (1, 1)),
    Step(SESSION, 0, 0, 0, make_tensor(1, 1, 1), (0,), is_decoded=True),
    Step(SESSION, U32, U64, limits.MAX_SESSION_TOKENS, make_tensor(), (0, 1), True, True),
    Step(SESSION, 1, 1, 1, make_tensor(256, 1, 2), tuple(range(255, -1, -1))),
    Step(SESSION, 1, 1, 1, make_tensor(1, 4096, 2), None, False, True),
    Step(SESSION, 1, 1, 1, make_tensor(1, 1, 2**16, WireDtype.FP32), None, True, False),
    OUTPUT,
    Output(SESSION, U32, U64, limits.MAX_SESSION_TOKENS, make_tensor(dtype=WireDtype.FP16)),
    Gap(SESSION, 0, 1, 0),
    Gap(SESSION, U32, U64, limits.MAX_SESSION_TOKENS),
    Close(SESSION, 0),
    Close(SESSION, U32),
    Declined(SESSION, 7, ErrorCode.CACHE_FULL, "the cache is full", 2.5),
    Declined(None, 0, ErrorCode.BAD_FRAME, ""),
    Declined(SESSION, U64, ErrorCode.INTERNAL, TEXT, 0.0),
    *(Declined(None, 0, code, code.name) for code in ErrorCode),
]
ONE_OF_EACH: dict[Kind, Message] = {
    Kind.HELLO: HONEST[1],
    Kind.WELCOME: WELCOME,
    Kind.OPEN: OPEN,
    Kind.OPENED: Opened(SESSION, 1, 0.5, 1000),
    Kind.STEP: STEP,
    Kind.OUTPUT: OUTPUT,
    Kind.GAP: Gap(SESSION, 1, 2, 3),
    Kind.CLOSE: Close(SESSION, 1),
    Kind.DECLINED: Declined(SESSION, 7, ErrorCode.CACHE_FULL, "full", 2.5),
    Kind.QUEUED: Queued(SESSION, 1, 2.5),
}


def patch(frame: bytes, **fields: Any) -> bytes:
    """Return the frame with header fields overwritten."""
    changed = bytearray(frame)
    for name, value in fields.items():
        offset, form = OFFSETS[name]
        struct.pack_into(form, changed, offset, value)
    return bytes(changed)


def with_control(message: Message, body: bytes) -> bytes:
    """Return the message's frame with another control part."""
    frame = encode_frame(message)
    (length,) = struct.unpack_from("<I", frame, OFFSETS["control_length"][0])
    changed = frame[:HEADER_BYTES] + body + frame[HEADER_BYTES + length :]
    return patch(changed, control_length=len(body))


def decode_or_refuse(frame: bytes) -> Message | None:
    """Return the message, or None for a RemoteProtocolError; everything else gets through."""
    try:
        return decode_frame(frame)
    except RemoteProtocolError:
        return None


def check_is_canonical(message: Message) -> None:
    """What was accepted from a stranger can be sent on and means the same there."""
    assert decode_frame(encode_frame(message)) == message


# ---- what is honest


@pytest.mark.parametrize("message", HONEST, ids=lambda message: type(message).__name__)
def test_message_survives_the_way(message: Message) -> None:
    assert decode_frame(encode_frame(message)) == message


def test_every_kind_has_a_message_here() -> None:
    assert set(ONE_OF_EACH) == set(Kind)
    assert {encode_frame(message)[3] for message in HONEST} == {kind.value for kind in Kind}


def test_frame_of_a_decode_step_is_as_documented() -> None:
    message = replace(STEP, is_decoded=True)
    tensor = bytes(message.hidden.data)
    header = b"sh" + bytes([1, 5]) + b"\x02\x00" + bytes([3, 1]) + bytes(range(16))
    numbers = struct.pack("<IQIIIIII", 1, 2, 3, 1, 1, 8, 0, len(tensor))

    assert encode_frame(message) == header + numbers + tensor
    assert HEADER_BYTES == 60


@pytest.mark.parametrize("flag", [{"is_decoded": True}, {"last_token_only": True}, {}])
def test_step_without_row_map_carries_no_protobuf(flag: dict[str, bool]) -> None:
    frame = encode_frame(replace(STEP, **flag))

    assert len(frame) == HEADER_BYTES + len(STEP.hidden.data)


def test_largest_frame_is_taken_and_one_more_row_is_not() -> None:
    width = 2**16
    tokens = (limits.MAX_FRAME_BYTES - HEADER_BYTES) // (2 * width)

    assert decode_frame(encode_frame(replace(STEP, hidden=make_tensor(1, tokens, width))))
    with pytest.raises(LocalProtocolError, match="fewer tokens"):
        encode_frame(replace(STEP, hidden=make_tensor(1, tokens + 1, width)))


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.OUTPUT])
def test_tensor_of_a_decoded_frame_is_a_view(kind: Kind) -> None:
    message = replace(ONE_OF_EACH[kind], hidden=make_tensor(4, 1024, 1024))  # type: ignore[arg-type]
    frame = encode_frame(message)

    tracemalloc.start()
    try:
        decoded = decode_frame(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert isinstance(decoded, Step | Output)
    assert isinstance(decoded.hidden.data, memoryview)
    assert decoded.hidden.data.obj is frame
    assert peak_bytes < 100_000


def test_tensor_may_be_given_as_a_view_of_numbers() -> None:
    numbers = memoryview(struct.pack("<4f", 1, 2, 3, 4)).cast("i")
    tensor = WireTensor(WireDtype.FP32, WireCodec.RAW, 1, 1, 4, numbers)

    decoded = decode_frame(encode_frame(replace(STEP, hidden=tensor)))

    assert isinstance(decoded, Step)
    assert bytes(decoded.hidden.data) == numbers.tobytes()


# ---- what does not fit: our own fault

DISHONEST: list[Message] = [
    replace(STEP, session=SessionId(bytes(16))),
    replace(STEP, session=SessionId(bytes(range(15)))),
    replace(STEP, session=SessionId(bytes(range(17)))),
    replace(STEP, epoch=-1),
    replace(STEP, epoch=2**32),
    replace(STEP, sequence=-1),
    replace(STEP, sequence=2**64),
    replace(STEP, position=-1),
    replace(STEP, position=limits.MAX_SESSION_TOKENS + 1),
    replace(STEP, row_map=()),
    replace(STEP, row_map=(1,)),
    replace(STEP, row_map=(-1,)),
    replace(STEP, row_map=(0, 0)),
    replace(STEP, hidden=replace(STEP.hidden, data=bytes(15))),
    replace(STEP, hidden=replace(STEP.hidden, rows=0)),
    replace(STEP, hidden=replace(STEP.hidden, rows=limits.MAX_BATCH_ROWS + 1)),
    replace(STEP, hidden=replace(STEP.hidden, dtype=WireDtype.FP32)),
    replace(OUTPUT, queue_seconds=float("nan")),
    replace(OUTPUT, compute_seconds=-0.5),
    replace(OUTPUT, compute_seconds=float("inf")),
    replace(OUTPUT, compute_seconds=1e39),  # finite here, infinite as float32
    replace(OUTPUT, position=-1),
    replace(OUTPUT, hidden=replace(STEP.hidden, width=9)),
    Hello(-1, 1, ""),
    Hello(1, 2**32, ""),
    Hello(1, 1, TEXT + "x"),
    Hello(1, 1, "", ClientToken(b"too short")),
    Hello(1, 1, "", ClientToken(bytes(17))),
    Hello(1, 1, "\ud800"),
    Hello(1, 1, "\x1b[31m"),
    replace(WELCOME, model_id=ModelId("short")),
    replace(WELCOME, span=Span(0, limits.MAX_BLOCKS + 1)),
    replace(WELCOME, wall_seconds=float("nan")),
    replace(WELCOME, peer_id=PeerId(TEXT + "x")),
    replace(OPEN, num_rows=0),
    replace(OPEN, num_rows=limits.MAX_BATCH_ROWS + 1),
    replace(OPEN, max_tokens=0),
    replace(OPEN, max_tokens=limits.MAX_SESSION_TOKENS + 1),
    replace(OPEN, span=Span(5000, 5001)),
    replace(OPEN, model_id=ModelId("ä" * 32)),
    replace(OPEN, session=SessionId(b"")),
    replace(OPEN, max_wait_seconds=-1.0),
    replace(OPEN, max_wait_seconds=float("inf")),
    Queued(SESSION, 1, float("nan")),
    Queued(SESSION, 1, -1.0),
    Opened(SESSION, 1, float("inf"), 1),
    Opened(SESSION, 1, 0.0, -1),
    Opened(SESSION, 1, 0.0, 2**64),
    Gap(SESSION, 1, 1, -1),
    Gap(SESSION, 1, 1, limits.MAX_SESSION_TOKENS + 1),
    Close(SessionId(bytes(16)), 1),
    Declined(SessionId(b"x"), 0, ErrorCode.BUSY, ""),
    Declined(None, 0, ErrorCode.BUSY, "", -1.0),
    Declined(None, 0, ErrorCode.BUSY, "", float("nan")),
    Declined(None, -1, ErrorCode.BUSY, ""),
]


@pytest.mark.parametrize("message", DISHONEST, ids=repr)
def test_what_the_other_end_would_refuse_is_not_sent(message: Message) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        encode_frame(message)


def test_text_of_a_refusal_is_made_to_fit() -> None:
    """An error must never fail because of what it says: it may quote anything."""
    detail = "two\nlines \x1b[2J \ud800 " + "ä" * 2 * limits.MAX_TEXT_CHARACTERS

    decoded = decode_frame(encode_frame(Declined(None, 0, ErrorCode.INTERNAL, detail)))

    assert isinstance(decoded, Declined)
    assert len(decoded.detail) == limits.MAX_TEXT_CHARACTERS
    assert decoded.detail.startswith("two lines  [2J   ää")


# ---- what a stranger sends


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"hs"},
        {"magic": b"SH"},
        {"version": 0},
        {"version": 2},
        {"version": 255},
        {"kind": 0},
        {"kind": 11},
        {"kind": 255},
        *({"flags": 1 << bit} for bit in range(2, 16)),
        {"flags": 0xFFFF},
        {"control_length": U32},
        {"control_length": limits.MAX_CONTROL_BYTES + 1},
        {"tensor_length": U32},
        {"tensor_length": 2**31},
    ],
    ids=str,
)
def test_damaged_header_is_refused(kind: Kind, changes: dict[str, Any]) -> None:
    frame = patch(encode_frame(ONE_OF_EACH[kind]), **changes)

    with pytest.raises(RemoteProtocolError):
        decode_frame(frame)


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.OUTPUT])
@pytest.mark.parametrize(
    "changes",
    [
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
    ],
    ids=str,
)
def test_contradicting_tensor_header_is_refused(kind: Kind, changes: dict[str, Any]) -> None:
    frame = patch(encode_frame(ONE_OF_EACH[kind]), **changes)

    with pytest.raises(RemoteProtocolError):
        decode_frame(frame)


USED = {
    Kind.HELLO: set(),
    Kind.WELCOME: set(),
    Kind.OPEN: {"session", "epoch"},
    Kind.OPENED: {"session", "epoch"},
    Kind.GAP: {"session", "epoch", "sequence", "position"},
    Kind.CLOSE: {"session", "epoch"},
    Kind.DECLINED: {"session", "sequence"},
}


@pytest.mark.parametrize("kind", list(USED))
def test_fields_without_a_use_have_to_be_zero(kind: Kind) -> None:
    frame = encode_frame(ONE_OF_EACH[kind])
    values = {"session": SESSION, "epoch": 1, "sequence": 1, "position": 1, "flags": 1, "dtype": 1}
    values |= {"codec": 1, "rows": 1, "tokens": 1, "width": 1}

    for name in set(values) - USED[kind]:
        with pytest.raises(RemoteProtocolError):
            decode_frame(patch(frame, **{name: values[name]}))


@pytest.mark.parametrize("kind", [Kind.GAP, Kind.CLOSE])
def test_messages_without_a_control_part_refuse_one(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError, match="control"):
        decode_frame(with_control(ONE_OF_EACH[kind], b"\x08\x01"))


@pytest.mark.parametrize("kind", set(Kind) - {Kind.HELLO, Kind.WELCOME})
def test_missing_session_is_refused(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError, match="session"):
        decode_frame(patch(encode_frame(ONE_OF_EACH[kind]), session=bytes(16)))


@pytest.mark.parametrize("kind", set(Kind) - {Kind.STEP, Kind.OUTPUT})
def test_control_messages_carry_no_tensor(kind: Kind) -> None:
    frame = encode_frame(ONE_OF_EACH[kind]) + bytes(16)
    frame = patch(frame, tensor_length=16, rows=1, tokens=1, width=8, dtype=3, codec=1)

    with pytest.raises(RemoteProtocolError, match="no tensor"):
        decode_frame(frame)


def float_body(number: int, value: float, form: str = "<f") -> bytes:
    """Return a protobuf field with a fixed-size number."""
    return bytes([number << 3 | (5 if form == "<f" else 1)]) + struct.pack(form, value)


NOT_SECONDS = [float("nan"), float("inf"), float("-inf"), -1.0, -1e-30]


@pytest.mark.parametrize("value", NOT_SECONDS)
def test_impossible_durations_are_refused(value: float) -> None:
    declined = pb.DeclinedBody(code=1, whole_stream=False).SerializeToString()
    welcome = pb.WelcomeBody(version=1, model_id=MODEL, span_stop=4).SerializeToString()
    frames = [
        with_control(ONE_OF_EACH[Kind.OPENED], float_body(1, value)),
        with_control(OUTPUT, float_body(1, value)),
        with_control(OUTPUT, float_body(2, value)),
        with_control(ONE_OF_EACH[Kind.DECLINED], declined + float_body(3, value)),
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
    body = pb.StepBody(row_map=row_map).SerializeToString()

    with pytest.raises(RemoteProtocolError, match="row map"):
        decode_frame(with_control(step, body))


def test_control_part_of_a_step_without_a_row_map_is_refused() -> None:
    unknown_field_only = bytes([9 << 3, 1])

    with pytest.raises(RemoteProtocolError, match="row map"):
        decode_frame(with_control(STEP, unknown_field_only))


BAD_BODIES: list[tuple[Kind, Any]] = [
    (Kind.HELLO, pb.HelloBody(software="x" * 513)),
    (Kind.HELLO, pb.HelloBody(client=b"x")),
    (Kind.HELLO, pb.HelloBody(client=bytes(60_000))),
    (Kind.HELLO, pb.HelloBody(software="\x1b]0;title\x07")),
    (Kind.WELCOME, pb.WelcomeBody(model_id=MODEL, span_start=4, span_stop=4)),
    (Kind.WELCOME, pb.WelcomeBody(model_id=MODEL, span_start=5, span_stop=4)),
    (Kind.WELCOME, pb.WelcomeBody(model_id=MODEL, span_stop=limits.MAX_BLOCKS + 1)),
    (Kind.WELCOME, pb.WelcomeBody(model_id=MODEL[1:], span_stop=4)),
    (Kind.WELCOME, pb.WelcomeBody(model_id="../" * 10 + "ab", span_stop=4)),
    (Kind.WELCOME, pb.WelcomeBody(model_id=MODEL, span_stop=4, peer_id="x" * 513)),
    (Kind.OPEN, pb.OpenBody()),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=0, max_tokens=1, dtype=1)),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=257, max_tokens=1, dtype=1)),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=1, max_tokens=0, dtype=1)),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=1, max_tokens=U32, dtype=1)),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=1, max_tokens=1, dtype=0)),
    (Kind.OPEN, pb.OpenBody(model_id=MODEL, span_stop=4, num_rows=1, max_tokens=1, dtype=9)),
    (Kind.DECLINED, pb.DeclinedBody(code=0)),
    (Kind.DECLINED, pb.DeclinedBody(code=max(ErrorCode) + 1)),
    (Kind.DECLINED, pb.DeclinedBody(code=U32)),
    (Kind.DECLINED, pb.DeclinedBody(code=1, detail="x" * 513)),
    (Kind.DECLINED, pb.DeclinedBody(code=1, detail="\x1b[2J")),
    (Kind.DECLINED, pb.DeclinedBody(code=1, whole_stream=True)),  # ... and names a session
]


@pytest.mark.parametrize(("kind", "body"), BAD_BODIES, ids=str)
def test_control_values_out_of_bounds_are_refused(kind: Kind, body: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(with_control(ONE_OF_EACH[kind], body.SerializeToString()))


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
    ids=repr,
)
@pytest.mark.parametrize("kind", set(Kind) - {Kind.GAP, Kind.CLOSE})
def test_invalid_protobuf_is_refused(kind: Kind, body: bytes) -> None:
    message = decode_or_refuse(with_control(ONE_OF_EACH[kind], body))

    if message is not None:  # a field of another number, which is skipped
        check_is_canonical(message)


def test_invalid_protobuf_names_the_message() -> None:
    with pytest.raises(RemoteProtocolError, match="OPENED"):
        decode_frame(with_control(ONE_OF_EACH[Kind.OPENED], b"\xff"))


def test_fields_of_a_newer_version_are_skipped() -> None:
    frame = encode_frame(ONE_OF_EACH[Kind.OPENED])
    body = frame[HEADER_BYTES:] + bytes([15 << 3, 1])

    assert decode_frame(with_control(ONE_OF_EACH[Kind.OPENED], body)) == decode_frame(frame)


@pytest.mark.parametrize("num_bytes", [0, 1, 2, HEADER_BYTES - 1, limits.MAX_FRAME_BYTES + 1])
def test_frame_of_impossible_size_is_refused(num_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="sizes"):
        decode_frame(b"sh" + bytes(num_bytes) if num_bytes > 100 else bytes(num_bytes))


def test_huge_declared_lengths_allocate_nothing() -> None:
    frames = [
        patch(encode_frame(STEP), tensor_length=U32, rows=256, tokens=4096, width=2**16),
        patch(encode_frame(STEP), tensor_length=U32 - 100, control_length=U32),
        with_control(STEP, b"\x0a\xff\xff\xff\xff\x0f"),
        with_control(ONE_OF_EACH[Kind.HELLO], b"\x1a\xff\xff\xff\xff\x07"),
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


# ---- fuzzing: whatever the bytes, a message that could have been sent, or the typed error


def flip(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(rng: random.Random, frame: bytes) -> bytes:
    names = rng.sample(sorted(set(OFFSETS) - {"magic", "session"}), rng.randint(1, 3))
    changed = frame
    for name in names:
        bits = 8 * struct.calcsize(OFFSETS[name][1])
        value = rng.choice((0, 1, 2, 3, 255, 2**bits - 1, 2 ** (bits - 1), rng.getrandbits(bits)))
        changed = patch(changed, **{name: value % 2**bits})
    return changed


def cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def extend(rng: random.Random, frame: bytes) -> bytes:
    return frame + rng.randbytes(rng.randint(1, 64))


def splice(rng: random.Random, frame: bytes) -> bytes:
    other = encode_frame(rng.choice(list(ONE_OF_EACH.values())))
    return frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :]


def scramble_control(rng: random.Random, frame: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", frame, OFFSETS["control_length"][0])
    noise = rng.randbytes(rng.randrange(24))
    return patch(frame[:HEADER_BYTES] + noise + frame[HEADER_BYTES + length :],
                 control_length=len(noise))  # fmt: skip


@pytest.mark.parametrize("mutate", [flip, overwrite, cut, extend, splice, scramble_control])
@pytest.mark.parametrize("kind", list(Kind))
def test_mutated_frame_decodes_or_is_refused(
    kind: Kind, mutate: Callable[[random.Random, bytes], bytes]
) -> None:
    rng = random.Random(f"{kind.name} {mutate.__name__}")
    frame = encode_frame(ONE_OF_EACH[kind])

    for _ in range(300):
        message = decode_or_refuse(mutate(rng, frame))
        if message is not None:
            check_is_canonical(message)


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_are_refused(seed: int) -> None:
    rng = random.Random(seed)

    for _ in range(500):
        noise = rng.randbytes(rng.randrange(200))
        assert decode_or_refuse(noise) is None
        message = decode_or_refuse(b"sh\x01" + bytes([rng.randint(1, 9)]) + noise)
        if message is not None:
            check_is_canonical(message)


@pytest.mark.parametrize("kind", list(Kind))
def test_bytes_beyond_the_declared_lengths_are_refused(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(encode_frame(ONE_OF_EACH[kind]) + b"x")


def test_control_part_has_a_limit() -> None:
    def decode_with_padding(num_bytes: int) -> Message:
        """Decode a Hello whose control part is one unknown field of so many bytes."""
        padding = b"\x7a" + pb.HelloBody(software="x" * (num_bytes - 4)).SerializeToString()[1:]
        assert len(padding) == num_bytes
        return decode_frame(with_control(ONE_OF_EACH[Kind.HELLO], padding))

    assert decode_with_padding(limits.MAX_CONTROL_BYTES - 4) == Hello(0, 0, "")
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_with_padding(limits.MAX_CONTROL_BYTES + 4)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_prefix_of_a_frame_is_refused(kind: Kind) -> None:
    frame = encode_frame(ONE_OF_EACH[kind])

    assert all(decode_or_refuse(frame[:stop]) is None for stop in range(len(frame)))
