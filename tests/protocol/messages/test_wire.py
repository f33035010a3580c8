"""Frames: everything honest survives the way, everything else is a typed error."""

import math
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from wire_messages import (
    ADAMW,
    ADAPTED,
    ADAPTER,
    BALLOT,
    DECISION,
    HEAD,
    HONEST,
    MEMBER,
    ONE_OF_EACH,
    OPEN,
    OUTPUT,
    PASS,
    PASS_ID,
    PIECE,
    PUBLISHED,
    SESSION,
    SGD,
    STEP,
    SUM,
    TEXT,
    WELCOME,
    make_tensor,
)

from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode, LocalProtocolError
from shoal.protocol.ids import (
    NO_ADAPTER,
    AdapterId,
    ClientToken,
    MemberId,
    ModelId,
    PassId,
    PeerId,
    SessionId,
    UploadId,
)
from shoal.protocol.messages.adapters import (
    AdapterFetch,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterUpdate,
    AdapterWithdrawal,
    Leaf,
    Manifest,
    OptimizerKind,
    PublicationFetch,
)
from shoal.protocol.messages.codec import CODECS, HEADER_BYTES, decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.passes import AccumulationOrder, AdapterRows, Passed, PassKind
from shoal.protocol.messages.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS_BYTES,
    RecordFetch,
    Records,
)
from shoal.protocol.messages.runs import (
    HeldOutPass,
    HeldOutPassed,
    PartPass,
    PartPassed,
    PartsCounted,
    Reduced,
    Reduction,
    RunFollows,
    RunHello,
    RunJoin,
    StateFollows,
    SumFetch,
    SumGroup,
    Vote,
)
from shoal.protocol.messages.session import (
    Close,
    Declined,
    Gap,
    Hello,
    Opened,
    Output,
    Queued,
    Step,
)
from shoal.protocol.runs.decisions import Decided, Prepare
from shoal.protocol.runs.update_parts import MemberManifest
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype, WireTensor


def tell(**told: Any) -> PartsCounted:
    return PartsCounted(SESSION, 0, MemberManifest(**{"update": 0, "is_ready": True, **told}))


# ---- what is honest


def test_message_survives_the_way() -> None:
    for message in HONEST:
        assert decode_frame(encode_frame(message)) == message


def test_every_kind_has_a_message_here() -> None:
    assert {message.KIND for message in ONE_OF_EACH} == set(CODECS)
    assert {encode_frame(message)[3] for message in HONEST} == set(CODECS)


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


@pytest.mark.parametrize("kind", [Step, Output])
def test_tensor_of_a_decoded_frame_is_a_view(kind: type[Message]) -> None:
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
    tensor = WireTensor(WireDtype.FP32, 1, 1, 4, numbers)

    decoded = decode_frame(encode_frame(replace(STEP, hidden=tensor)))

    assert isinstance(decoded, Step)
    assert bytes(decoded.hidden.data) == numbers.tobytes()


# ---- what does not fit: our own fault

DISHONEST: list[Message] = [
    Hello(1, 1, "", model_id=ModelId("a" * 31)),
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
    replace(PASS, pass_id=PassId(SessionId(bytes(16)))),
    replace(PASS, num_rows=0),
    replace(PASS, num_rows=limits.MAX_BATCH_ROWS + 1),
    replace(PASS, num_tokens=0),
    replace(PASS, num_rows=1, num_tokens=limits.MAX_PASS_TOKENS + 1),
    replace(PASS, num_rows=2, num_tokens=limits.MAX_PASS_TOKENS),
    replace(PASS, prompt_rows=1),
    replace(PASS, prompt_tokens=1),
    replace(PASS, prompt_rows=3, prompt_tokens=1),
    replace(PASS, prompt_rows=1, prompt_tokens=8),
    replace(PASS, span=Span(0, limits.MAX_BLOCKS), num_tokens=17, prompt_rows=1, prompt_tokens=17),
    replace(PIECE, tensor=make_tensor(2, 1, 8)),
    replace(PIECE, offset=limits.MAX_PASS_PROMPTS),
    replace(PIECE, offset=-1),
    Passed(PASS_ID, -1.0, 0.0),
    Passed(PASS_ID, 0.0, float("nan")),
    replace(OPEN, adapter=AdapterId(bytes(31))),
    replace(ADAPTED, adapters=(AdapterRows(ADAPTER, 1),)),
    replace(ADAPTED, adapters=(AdapterRows(ADAPTER, 3),)),
    replace(ADAPTED, adapters=(AdapterRows(ADAPTER, 2), AdapterRows(ADAPTER, 0))),
    replace(ADAPTED, adapters=(AdapterRows(AdapterId(b"short"), 2),)),
    replace(ADAPTED, adapter_vectors=limits.MAX_PASS_ADAPTERS + 1),
    replace(ADAPTED, kind=PassKind.FORWARD, adapter_vectors=1),
    replace(PASS, kind=PassKind.BACKWARD, adapter_vectors=1),
    replace(HEAD, adapter=NO_ADAPTER),
    replace(HEAD, replaces=AdapterId(b"short")),
    replace(HEAD, num_bytes=0),
    replace(HEAD, num_bytes=limits.MAX_ADAPTER_BYTES + 1),
    replace(HEAD, config=b""),
    replace(HEAD, config=bytes(limits.MAX_ADAPTER_CONFIG_BYTES + 1)),
    replace(HEAD, upload_id=UploadId(SessionId(bytes(16)))),
    replace(HEAD, num_updates=1),
    replace(HEAD, optimizer=OptimizerKind.ADAMW, is_published=True),
    replace(HEAD, optimizer=OptimizerKind.ADAMW, num_updates=1, num_bytes=5000),
    replace(HEAD, optimizer=OptimizerKind.SGD, num_bytes=limits.MAX_ADAPTER_BYTES + 2),
    replace(PUBLISHED, is_published=False),
    replace(PUBLISHED, adapter=ADAPTER),
    replace(PUBLISHED, config=b"{ }"),
    replace(PUBLISHED, leaves=PUBLISHED.leaves[::-1]),
    replace(PUBLISHED, leaves=PUBLISHED.leaves[:1]),
    *(
        Manifest(b"{}", leaves).make_head(HEAD.upload_id, 1)
        for leaves in (
            (Leaf(7, bytes(32), 1), Leaf(7, bytes(32), 1)),
            (Leaf(limits.MAX_BLOCKS, bytes(32), 1),),
            (Leaf(0, bytes(31), 1),),
            (Leaf(0, bytes(32), 0),),
            (Leaf(0, bytes(32), limits.MAX_ADAPTER_BYTES + 1),),
            tuple(Leaf(i, bytes(32), 1) for i in range(limits.MAX_ADAPTER_LEAVES + 1)),
        )
    ),
    PublicationFetch(PASS_ID, NO_ADAPTER, 0, 1),
    RecordFetch(SESSION, b"", b"", 0),
    RecordFetch(SESSION, b"", b"", MAX_RECORDS_BYTES + 1),
    RecordFetch(SESSION, b"", bytes(7), 1),
    RecordFetch(SESSION, b"", bytes(2**15 + 8), 1),
    RecordFetch(SESSION, bytes(MAX_RECORD_BYTES + 1), b"", 1),
    Records(SESSION, (bytes(MAX_RECORD_BYTES + 1),)),
    Records(SESSION, (b"",)),
    Records(SESSION, (bytes(MAX_RECORD_BYTES),) * 13),
    RunHello(SESSION, bytes(31), MEMBER, None, bytes(64)),
    RunHello(SESSION, bytes(32), MemberId(""), None, bytes(64)),
    RunHello(SESSION, bytes(32), MEMBER, MemberId("\x1b[2J"), bytes(64)),
    RunHello(SESSION, bytes(32), MEMBER, None, bytes(63)),
    RunFollows(SESSION, limits.MAX_RUN_RECORD_BYTES + 1),
    RunJoin(SESSION, MemberId("x" * (limits.MAX_MEMBER_ID_CHARACTERS + 1)), bytes(32)),
    RunJoin(SESSION, MEMBER, bytes(32), bytes(limits.MAX_STAGES // 8 + 1)),
    RunJoin(SESSION, MEMBER, bytes(31)),
    StateFollows(SESSION, 4, bytes(31), bytes(32)),
    StateFollows(SESSION, 4, bytes(32), b""),
    PartPass(SESSION, limits.MAX_RUN_TENSOR_BYTES + 1, 0, 0),
    PartPass(SESSION, 0, limits.MAX_UPDATES, 0),
    PartPass(SESSION, 0, 0, limits.MAX_PARTS),
    PartPass(SESSION, 0, 0, 0, (MEMBER,) * (limits.MAX_STAGES + 1)),
    PartPass(SESSION, 0, 0, 0, (MemberId(""),)),
    PartPass(SESSION, 0, 0, 0, (), limits.MAX_STAGES),
    PartPass(SESSION, 0, 0, 0, num_restarts=limits.MAX_RESTARTS),
    PartPassed(SESSION, 0, math.nan, ()),
    tell(counted={limits.MAX_PARTS: bytes(8)}),
    tell(audited={limits.MAX_PARTS: bytes(8)}),
    HeldOutPass(SESSION, limits.MAX_RUN_TENSOR_BYTES + 1, 0, 0),
    HeldOutPass(SESSION, 0, limits.MAX_UPDATES, 0),
    HeldOutPass(SESSION, 0, 0, limits.MAX_PARTS),
    HeldOutPass(SESSION, 0, 0, 0, (MEMBER,) * (limits.MAX_STAGES + 1)),
    HeldOutPassed(SESSION, math.nan),
    HeldOutPassed(SESSION, -1.0),
    HeldOutPassed(SESSION, 2 * limits.MAX_HELD_OUT_LOSS),
    tell(update=limits.MAX_UPDATES),
    tell(refused=frozenset([limits.MAX_PARTS])),
    tell(state=bytes(31)),
    tell(accused=(MEMBER, MEMBER)),
    tell(unreachable=(MEMBER, MEMBER)),
    tell(part_seconds=-1.0),
    tell(part_wait_seconds=math.nan),
    tell(fetched_bytes=65, state_bytes=64),
    tell(state_bytes=limits.MAX_RUN_TENSOR_BYTES),
    Reduction(SESSION, 0, bytes(15), b"", (MEMBER,)),
    Reduction(SESSION, 0, bytes(16), b"", (MEMBER, MEMBER)),
    Reduced(SESSION, bytes(31), 0.0, 0.0),
    Reduced(SESSION, bytes(32), -1.0, 0.0),
    Reduced(SESSION, bytes(32), math.nan, 0.0),
    Reduced(SESSION, bytes(32), 0.0, math.inf),
    Reduced(SESSION, bytes(32), 0.0, -1.0),
    Vote(SESSION),
    replace(Vote.make(SESSION, Decided(DECISION)), prepare=Prepare(7, BALLOT)),
    SumFetch(SESSION, bytes(16), SumGroup.STAGE, True, 2, 2),
    SumFetch(SESSION, bytes(16), SumGroup.STAGE, True, 0, limits.MAX_RUN_TENSOR_BYTES),
    PublicationFetch(PASS_ID, ADAPTER, limits.MAX_BLOCKS, 1),
    PublicationFetch(PASS_ID, ADAPTER, 0, limits.MAX_BLOCKS + 1),
    replace(ADAPTED, accumulate=AccumulationOrder(0, 1)),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 0)),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 1, math.nan)),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 1), adapter_vectors=1),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 1), kind=PassKind.FORWARD),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 1), adapters=()),
    replace(
        ADAPTED,
        accumulate=AccumulationOrder(1, 1),
        adapters=(AdapterRows(ADAPTER, 1), AdapterRows(AdapterId(bytes(range(32))), 1)),
    ),
    AdapterMeasure(PASS_ID, replace(SUM, parts=())),
    AdapterMeasure(PASS_ID, replace(SUM, parts=(1, 1))),
    AdapterMeasure(PASS_ID, replace(SUM, parts=(2, 1))),
    AdapterMeasure(PASS_ID, replace(SUM, parts=tuple(range(1, limits.MAX_GRADIENT_PARTS + 2)))),
    AdapterMeasure(PASS_ID, replace(SUM, number=0)),
    AdapterMeasure(PASS_ID, replace(SUM, adapter=NO_ADAPTER)),
    AdapterMeasured(PASS_ID, math.inf),
    AdapterMeasured(PASS_ID, -1.0),
    AdapterUpdate(PASS_ID, SUM, ADAMW, 1.5),
    AdapterUpdate(PASS_ID, SUM, ADAMW, math.nan),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, kind=OptimizerKind.NONE)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, learning_rate=-1.0)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, learning_rate=math.inf)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, learning_rate=1e9)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, weight_decay=math.nan)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, momentum=0.9)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, beta1=1.0)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, beta2=-0.1)),
    AdapterUpdate(PASS_ID, SUM, replace(ADAMW, epsilon=0.0)),
    AdapterUpdate(PASS_ID, SUM, replace(SGD, momentum=1.0)),
    AdapterUpdate(PASS_ID, SUM, replace(SGD, beta1=0.9)),
    AdapterFetch(PASS_ID, NO_ADAPTER),
    AdapterWithdrawal(PASS_ID, NO_ADAPTER),
    replace(HEAD, num_trained=limits.MAX_ADAPTER_BYTES + 1),
    replace(ADAPTED, trains_adapters=True),
    replace(PASS, trains_adapters=True),
    AdapterPiece(HEAD.upload_id, 0, b""),
    AdapterPiece(HEAD.upload_id, -1, b"x"),
    AdapterPiece(HEAD.upload_id, limits.MAX_TRAINED_BYTES, b"x"),
    AdapterPiece(HEAD.upload_id, 0, bytes(limits.MAX_CONTROL_BYTES + 1)),
    AdapterKept(HEAD.upload_id, float("nan")),
]


def test_what_the_other_end_would_refuse_is_not_sent() -> None:
    for message in DISHONEST:
        with pytest.raises(LocalProtocolError, match=type(message).__name__):
            pytest.fail(f"sent as {len(encode_frame(message))} bytes: {message}")


def test_text_of_a_refusal_is_made_to_fit() -> None:
    """An error must never fail because of what it says: it may quote anything."""
    detail = "two\nlines \x1b[2J \ud800 " + "ä" * 2 * limits.MAX_TEXT_CHARACTERS

    decoded = decode_frame(encode_frame(Declined(None, 0, ErrorCode.INTERNAL, detail)))

    assert isinstance(decoded, Declined)
    assert len(decoded.detail) == limits.MAX_TEXT_CHARACTERS
    assert decoded.detail.startswith("two lines  [2J   ää")
