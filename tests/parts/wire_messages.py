"""Messages of every kind, and frames with something else written into them."""

import random
import struct
from dataclasses import replace
from typing import Any

from shoal.protocol import limits
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, RemoteProtocolError
from shoal.protocol.ids import (
    NO_ADAPTER,
    AdapterId,
    Capability,
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
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterUpdate,
    AdapterWithdrawal,
    GradientSum,
    Leaf,
    Manifest,
    OptimizerKind,
    OptimizerSettings,
    PublicationFetch,
)
from shoal.protocol.messages.codec import CODECS, HEADER_BYTES, decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.passes import (
    AccumulationOrder,
    AdapterRows,
    Pass,
    Passed,
    PassKind,
    PassPiece,
    Slot,
)
from shoal.protocol.messages.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS_BYTES,
    RecordFetch,
    Records,
)
from shoal.protocol.messages.reverse_connections import Offer, Parked
from shoal.protocol.messages.runs import (
    HeldOutPass,
    HeldOutPassed,
    PartPass,
    PartPassed,
    PartsCounted,
    PartsFetch,
    Reduced,
    Reduction,
    RunFetch,
    RunFollows,
    RunHello,
    RunJoin,
    RunPiece,
    RunWelcome,
    StateFetch,
    StateFollows,
    StatePart,
    SumFetch,
    SumGroup,
    Sums,
    Vote,
    Voted,
)
from shoal.protocol.messages.session import (
    Admit,
    Attach,
    Close,
    Declined,
    Gap,
    Hello,
    HopSeconds,
    Leaving,
    Mirror,
    NextHop,
    Open,
    Opened,
    Output,
    Probe,
    Queued,
    Redirect,
    Status,
    Step,
    Welcome,
)
from shoal.protocol.runs.decisions import (
    Accept,
    Accepted,
    Ballot,
    Decided,
    Decision,
    Member,
    Prepare,
    Promise,
    Refusal,
)
from shoal.protocol.runs.update_parts import MemberManifest
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat, WireDtype, WireTensor, compute_num_bytes

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
    data = random.Random(rows).randbytes(compute_num_bytes(dtype, rows, tokens, width))
    return WireTensor(dtype, rows, tokens, width, data)


STEP = Step(SESSION, 1, 2, 3, make_tensor(1, 1, 8))
OUTPUT = Output(SESSION, 1, 2, 3, make_tensor(1, 1, 8), 0.25, 0.5)
PARENT = SessionId(b"the session from")
OPEN = Open(SESSION, 1, MODEL, Span(2, 5), 2, 128, WireDtype.BF16)
CAPABILITY = Capability(b"the key to a hop")
ENDPOINTS = (Endpoint("192.0.2.7", 4040, "f" * 64), Endpoint("peer.example", 1))
NEXT = NextHop(PeerId("12D3KooW"), ENDPOINTS, PARENT, 2, CAPABILITY, 7)
BEFORE = (HopSeconds(0.25, 0.5), HopSeconds(0.0, 1.5))
PASS_ID = PassId(SessionId(bytes(range(1, 17))))
PASS = Pass(PASS_ID, PassKind.FORWARD, MODEL, Span(2, 5), 2, 7, WireDtype.BF16)
PIECE = PassPiece(PASS_ID, Slot.GRADIENTS, 3, make_tensor(1, 2, 8))
WELCOME = Welcome(1, "shoal", PeerId("12D3KooW"), MODEL, Span(0, 4), 1_700_000_000.25)
ADAPTER = AdapterId(b"the digest of two files of peft!")
HEAD = AdapterHead(UploadId(SessionId(bytes(range(2, 18)))), ADAPTER, b"{}", 5000)
MANIFEST = Manifest(b"{}", (Leaf(0, bytes(range(32)), 100), Leaf(7, bytes(32), 200)))
PUBLISHED = MANIFEST.make_head(HEAD.upload_id, 300)
_LEAVES = Manifest(
    bytes(2**14), tuple(Leaf(i, b"\xff" * 32, 2**26) for i in range(limits.MAX_ADAPTER_LEAVES))
)
ADAPTED = replace(
    PASS, kind=PassKind.BACKWARD, adapters=(AdapterRows(ADAPTER, 1), AdapterRows(NO_ADAPTER, 1))
)
SUM = GradientSum(ADAPTER, 3, (1, 2, 7))
ADAMW = OptimizerSettings(OptimizerKind.ADAMW, 1e-3, 0.01, 0.0, 0.9, 0.999, 1e-8)
SGD = OptimizerSettings(OptimizerKind.SGD, 0.1, 0.0, 0.9)
OFFER = Offer(PeerId("12D3KooW"), True, bytes(range(64)))

MEMBER = MemberId("12D3KooWmember/0011223344556677")
OTHER_MEMBER = MemberId("12D3KooWother/8899aabbccddeeff")
BALLOT = Ballot(2, MEMBER)
DECISION = Decision(7, bytes(range(32)), (Member(MEMBER, 0), Member(OTHER_MEMBER, 1)), b"value")
ATTEMPT = bytes(range(16))
MEMBER_MANIFEST = MemberManifest(
    3,
    is_ready=True,
    is_applying=True,
    counted={0: bytes(range(8)), 300: bytes(range(8, 16))},
    audited={1: bytes(range(16, 24))},
    refused=frozenset([1]),
    state=bytes(range(32)),
    is_leaving=True,
    accused=(MEMBER,),
    unreachable=(OTHER_MEMBER,),
    part_seconds=0.5,
    part_wait_seconds=0.25,
    fetched_bytes=64,
    state_bytes=96,
)
RUN_MESSAGES: tuple[Message, ...] = (
    RunHello(SESSION, bytes(range(32)), MEMBER, OTHER_MEMBER, bytes(64)),
    RunWelcome(SESSION),
    RunFetch(SESSION),
    RunFollows(SESSION, 2048),
    RunJoin(SESSION, MEMBER, bytes(range(32)), b"\x05"),
    RunPiece(SESSION, 4096, WireTensor(WireDtype.FP32, 1, 1, 2, bytes(8))),
    PartPass(SESSION, 64, 3, 5, (MEMBER, OTHER_MEMBER), 2, OTHER_MEMBER, True, True, 4),
    PartPassed(SESSION, 64, 1.5, (MEMBER,)),
    HeldOutPass(SESSION, 64, 3, 5, (MEMBER, OTHER_MEMBER)),
    HeldOutPassed(SESSION, 1.5),
    PartsFetch(SESSION, Decided(DECISION), "a peer for stage 1"),
    PartsCounted(SESSION, 7, MEMBER_MANIFEST),
    Reduction(SESSION, 3, ATTEMPT, b"\x05", (MEMBER,), (MEMBER, OTHER_MEMBER)),
    Reduced(SESSION, bytes(range(32)), 2.5, 1.5),
    SumFetch(SESSION, ATTEMPT, SumGroup.TIED, True, 8, 16),
    Sums(SESSION, 64),
    StateFetch(SESSION, 3),
    StateFetch(SESSION, 3, StatePart.WEIGHTS),
    StateFollows(SESSION, 1024, bytes(range(32)), bytes(32)),
    Vote.make(SESSION, Promise(7, BALLOT, Accept(replace(BALLOT, attempt=1), DECISION))),
    Voted(SESSION),
)
"""One of each kind, of training runs."""

HONEST: list[Message] = [
    Hello(0, 0, ""),
    Hello(1, 7, "shoal 0.1.0"),
    Hello(U32, U32, TEXT),
    Hello(1, 1, "shoal 0.1.0", ClientToken(b"a client's name!")),
    Hello(1, 1, "shoal 0.1.0", model_id=ModelId("a" * 32)),
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
    replace(OPEN, parent=PARENT, prefix_tokens=1),
    replace(OPEN, parent=PARENT, prefix_tokens=OPEN.max_tokens),
    replace(OPEN, kv_format=KVFormat.INT8),
    replace(OPEN, capability=CAPABILITY, next=NEXT),
    replace(OPEN, prompt_rows=1, prompt_tokens=OPEN.max_tokens),
    replace(OPEN, prompt_rows=OPEN.num_rows, prompt_tokens=1),
    replace(OPEN, next=replace(NEXT, endpoints=ENDPOINTS[:1] * limits.MAX_ENDPOINTS)),
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
    Step(SESSION, 1, 1, 1, make_tensor(1, 1, 2), None, is_piece=True, before=BEFORE),
    Step(SESSION, 1, 1, 1, make_tensor(), (1, 0), before=BEFORE[:1] * limits.MAX_HOPS),
    OUTPUT,
    Output(SESSION, U32, U64, limits.MAX_SESSION_TOKENS, make_tensor(dtype=WireDtype.FP16)),
    replace(OUTPUT, before=BEFORE),
    Attach(SESSION, U32, CAPABILITY),
    Admit(SESSION, 0, CAPABILITY),
    Redirect(SESSION, 1, U64, NEXT),
    Redirect(SESSION, 1, 0),
    Probe(SESSION, U32),
    Leaving(SESSION, U32),
    Mirror(SESSION, U32, NEXT),
    replace(WELCOME, nonce=bytes(range(32))),
    replace(OPEN, capability=CAPABILITY, next=replace(NEXT, endpoints=())),
    OFFER,
    Offer(PeerId(TEXT), False, bytes(64)),
    Parked(),
    Status(SESSION, 1, U64, limits.MAX_SESSION_TOKENS, U64, U32),
    Status(SESSION, 1, 0, 0),
    Gap(SESSION, 0, 1, 0),
    Gap(SESSION, U32, U64, limits.MAX_SESSION_TOKENS),
    Close(SESSION, 0),
    Close(SESSION, U32),
    Declined(SESSION, 7, ErrorCode.CACHE_FULL, "the cache is full", 2.5),
    Declined(None, 0, ErrorCode.BAD_FRAME, ""),
    Declined(SESSION, U64, ErrorCode.INTERNAL, TEXT, 0.0),
    Declined(PASS_ID, 0, ErrorCode.BUSY, "too many passes", 1.0),
    PASS,
    Pass(
        PassId(SessionId(b"\xff" * 16)),
        PassKind.BACKWARD,
        MODEL,
        Span(0, limits.MAX_BLOCKS),
        1,
        limits.MAX_PASS_TOKENS,
        WireDtype.INT8,
        1,
        limits.MAX_PASS_PROMPTS // limits.MAX_BLOCKS,
    ),
    replace(PASS, num_rows=limits.MAX_BATCH_ROWS, prompt_rows=1, prompt_tokens=7),
    replace(PASS, prompt_rows=2, prompt_tokens=1),
    PIECE,
    replace(PIECE, slot=Slot.HIDDEN, offset=0, tensor=make_tensor(1, 4096, 2, WireDtype.INT8)),
    replace(PIECE, slot=Slot.PROMPTS, offset=limits.MAX_PASS_PROMPTS - 1),
    Passed(PASS_ID, 0.0, 1234.5),
    replace(OPEN, adapter=ADAPTER),
    ADAPTED,
    replace(ADAPTED, adapter_vectors=limits.MAX_PASS_ADAPTERS),
    replace(ADAPTED, num_rows=256, adapters=(AdapterRows(ADAPTER, 1),) * 256),
    HEAD,
    replace(HEAD, num_bytes=limits.MAX_ADAPTER_BYTES, is_published=True, replaces=ADAPTER),
    replace(HEAD, config=bytes(limits.MAX_ADAPTER_CONFIG_BYTES)),
    AdapterPiece(HEAD.upload_id, 0, b"\x00"),
    AdapterPiece(HEAD.upload_id, limits.MAX_ADAPTER_BYTES - 1, bytes(49152)),
    AdapterKept(HEAD.upload_id, 300.0),
    replace(HEAD, optimizer=OptimizerKind.ADAMW),
    replace(HEAD, optimizer=OptimizerKind.SGD, num_updates=U32),
    replace(ADAPTED, accumulate=AccumulationOrder(1, 1)),
    replace(ADAPTED, accumulate=AccumulationOrder(2**32, U32, 2.0**-20)),
    AdapterMeasure(PASS_ID, SUM),
    AdapterMeasured(PASS_ID, 1e300),
    AdapterUpdate(PASS_ID, SUM, ADAMW, 0.25),
    AdapterUpdate(PASS_ID, replace(SUM, parts=()), SGD),
    AdapterUpdate(PASS_ID, replace(SUM, parts=tuple(range(1, limits.MAX_GRADIENT_PARTS + 1))), SGD),
    AdapterFetch(PASS_ID, ADAPTER),
    replace(HEAD, num_trained=limits.MAX_ADAPTER_BYTES),
    PUBLISHED,
    replace(PUBLISHED, num_bytes=0),
    _LEAVES.make_head(HEAD.upload_id, 2**26),
    PublicationFetch(PASS_ID, ADAPTER),
    PublicationFetch(PASS_ID, ADAPTER, limits.MAX_BLOCKS - 1, limits.MAX_BLOCKS),
    replace(ADAPTED, kind=PassKind.FORWARD, trains_adapters=True),
    AdapterWithdrawal(PASS_ID, ADAPTER),
    RecordFetch(SESSION, b"", b"", 1),
    RecordFetch(SESSION, bytes(MAX_RECORD_BYTES), bytes(2**15), MAX_RECORDS_BYTES),
    Records(SESSION, (), has_own=True),
    Records(SESSION, (bytes(2304),) * 21),
    *(Declined(None, 0, code, code.name) for code in ErrorCode),
    *RUN_MESSAGES,
    RunHello(SESSION, bytes(32), MEMBER, None, bytes(64)),
    RunFollows(SESSION, limits.MAX_RUN_RECORD_BYTES),
    PartPass(SESSION, 0, 0, 0),
    PartPassed(SESSION, 0, -1.0, ()),
    HeldOutPass(SESSION, 0, 0, 0),
    HeldOutPassed(SESSION, 0.0),
    PartsCounted(SESSION, 0, MemberManifest(0, is_ready=False)),
    SumFetch(SESSION, ATTEMPT, SumGroup.STAGE, False, 0, 1),
    RunJoin(SESSION, MEMBER, b""),
    Vote.make(SESSION, Prepare(7, BALLOT)),
    Vote.make(SESSION, Promise(7, BALLOT, None)),
    Vote.make(SESSION, Accept(BALLOT, DECISION)),
    Vote.make(SESSION, Accepted(7, BALLOT)),
    Vote.make(SESSION, Refusal(7, BALLOT)),
    Vote.make(SESSION, Decided(DECISION)),
]
_ONE_OF_EACH: list[Message] = [
    HONEST[1],
    WELCOME,
    OPEN,
    Opened(SESSION, 1, 0.5, 1000),
    STEP,
    OUTPUT,
    Gap(SESSION, 1, 2, 3),
    Close(SESSION, 1),
    Declined(SESSION, 7, ErrorCode.CACHE_FULL, "full", 2.5),
    Attach(SESSION, 1, CAPABILITY),
    Admit(SESSION, 1, CAPABILITY),
    Redirect(SESSION, 1, 5, NEXT),
    Probe(SESSION, 1),
    Status(SESSION, 1, 5, 6, 4, 3),
    Queued(SESSION, 1, 2.5),
    Leaving(SESSION, 1),
    Mirror(SESSION, 1, NEXT),
    OFFER,
    Parked(),
    PASS,
    PIECE,
    Passed(PASS_ID, 0.25, 0.5),
    HEAD,
    AdapterPiece(HEAD.upload_id, 48, b"some bytes"),
    AdapterKept(HEAD.upload_id, 300.0),
    AdapterMeasure(PASS_ID, SUM),
    AdapterMeasured(PASS_ID, 0.25),
    AdapterUpdate(PASS_ID, SUM, ADAMW, 0.25),
    AdapterFetch(PASS_ID, ADAPTER),
    AdapterWithdrawal(PASS_ID, ADAPTER),
    PublicationFetch(PASS_ID, ADAPTER, 2, 3),
    RecordFetch(SESSION, b"a record", b"digests0digests1", 4096),
    Records(SESSION, (b"a record", b"another one")),
    *RUN_MESSAGES,
]
ONE_OF_EACH: dict[type[Message], Message] = {type(message): message for message in _ONE_OF_EACH}
BODIES: dict[type[Message], Any] = {
    codec.message: codec.body.type for codec in CODECS.values() if codec.body is not None
}
"""The protobuf part of each message that has one."""


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


def name_shortly(value: Any) -> str:
    """Return a name for a test of some value, as long as a line at most."""
    return repr(value)[:100]
