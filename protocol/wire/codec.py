"""Messages to frames and back: which field and which protobuf part holds what."""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from ..errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from ..ids import AdapterId, Capability, ClientToken, ModelId, PeerId, SessionId
from ..messages.session import (
    AdapterPiece,
    Admit,
    Attach,
    Close,
    Declined,
    Gap,
    Hello,
    Leaving,
    Message,
    Mirror,
    Offer,
    Open,
    Opened,
    Output,
    Parked,
    Pass,
    Passed,
    PassPiece,
    Probe,
    Queued,
    Redirect,
    Status,
    Step,
    Welcome,
)
from ..proto import wire_pb2 as pb
from ..spans import Span
from ..tensors import KVFormat, WireDtype, WireTensor
from . import adapters, chain, passes
from .field_checks import NO_SESSION
from .frames import Flag, Kind, Parts, join_frame, split_frame
from .message_checks import check_message, check_text, clean_text
from .offers import decode_offer, decode_parked, encode_offer, encode_parked


def encode_frame(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises LocalProtocolError when the other end would not accept them.
    """
    try:
        check_message(message)
        parts = _CODEC_OF_TYPE[type(message)].encode(message)
        return join_frame(parts)
    except (ValueError, struct.error) as error:
        name = type(message).__name__
        raise LocalProtocolError(f"this {name} cannot be sent: {error}") from error


def decode_frame(frame: bytes) -> Message:
    """Return the message of a frame. Tensor bytes are a view into the frame, not a copy.

    Raises RemoteProtocolError, and nothing else, for whatever a stranger may have sent.
    """
    parts = split_frame(frame)
    codec = _CODEC_OF_KIND[parts.kind]
    for name in codec.unused:
        if getattr(parts, name) != Parts._field_defaults[name]:
            raise RemoteProtocolError(f"a {parts.kind.name} frame has no {name}")
    try:
        message = codec.decode(parts)
        check_message(message)
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"damaged {parts.kind.name} frame: {error}") from None
    return message


_Body = TypeVar("_Body", bound=ProtobufMessage)


def _parse(body: _Body, parts: Parts) -> _Body:
    body.ParseFromString(bytes(parts.control))
    return body


def _session(parts: Parts) -> SessionId:
    return SessionId(parts.session)


def _tensor(parts: Parts) -> WireTensor:
    assert parts.tensor is not None  # split_frame made sure
    return parts.tensor


def _encode_hello(message: Hello) -> Parts:
    body = pb.HelloBody(
        min_version=message.min_version,
        max_version=message.max_version,
        software=message.software,
        client=message.client,
    )
    return Parts(Kind.HELLO, control=body.SerializeToString())


def _decode_hello(parts: Parts) -> Hello:
    body = _parse(pb.HelloBody(), parts)
    return Hello(body.min_version, body.max_version, body.software, ClientToken(body.client))


def _encode_welcome(message: Welcome) -> Parts:
    body = pb.WelcomeBody(
        version=message.version,
        software=message.software,
        peer_id=message.peer_id,
        model_id=message.model_id,
        span_start=message.span.start,
        span_stop=message.span.stop,
        wall_seconds=message.wall_seconds,
        nonce=message.nonce,
    )
    return Parts(Kind.WELCOME, control=body.SerializeToString())


def _decode_welcome(parts: Parts) -> Welcome:
    body = _parse(pb.WelcomeBody(), parts)
    return Welcome(
        body.version,
        body.software,
        PeerId(body.peer_id),
        ModelId(body.model_id),
        Span(body.span_start, body.span_stop),
        body.wall_seconds,
        body.nonce,
    )


def _encode_open(message: Open) -> Parts:
    body = pb.OpenBody(
        model_id=message.model_id,
        span_start=message.span.start,
        span_stop=message.span.stop,
        num_rows=message.num_rows,
        max_tokens=message.max_tokens,
        dtype=message.dtype,
        max_wait_seconds=message.max_wait_seconds,
        kv_format=message.kv_format,
        parent=message.parent or b"",
        prefix_tokens=message.prefix_tokens,
        capability=message.capability,
        next=chain.encode_next(message.next),
        adapter=message.adapter,
        prompt_rows=message.prompt_rows,
        prompt_tokens=message.prompt_tokens,
    )
    return Parts(Kind.OPEN, message.session, message.epoch, control=body.SerializeToString())


def _decode_open(parts: Parts) -> Open:
    body = _parse(pb.OpenBody(), parts)
    return Open(
        _session(parts),
        parts.epoch,
        ModelId(body.model_id),
        Span(body.span_start, body.span_stop),
        body.num_rows,
        body.max_tokens,
        WireDtype(body.dtype),
        body.max_wait_seconds,
        KVFormat(body.kv_format),
        parent=SessionId(body.parent) if body.parent else None,
        prefix_tokens=body.prefix_tokens,
        capability=Capability(body.capability),
        next=chain.decode_next(body.next) if body.HasField("next") else None,
        adapter=AdapterId(body.adapter),
        prompt_rows=body.prompt_rows,
        prompt_tokens=body.prompt_tokens,
    )


def _encode_queued(message: Queued) -> Parts:
    body = pb.QueuedBody(wait_seconds=message.wait_seconds)
    return Parts(Kind.QUEUED, message.session, message.epoch, control=body.SerializeToString())


def _decode_queued(parts: Parts) -> Queued:
    body = _parse(pb.QueuedBody(), parts)
    return Queued(_session(parts), parts.epoch, body.wait_seconds)


def _encode_opened(message: Opened) -> Parts:
    body = pb.OpenedBody(queue_seconds=message.queue_seconds, free_kv_tokens=message.free_kv_tokens)
    return Parts(Kind.OPENED, message.session, message.epoch, control=body.SerializeToString())


def _decode_opened(parts: Parts) -> Opened:
    body = _parse(pb.OpenedBody(), parts)
    return Opened(_session(parts), parts.epoch, body.queue_seconds, body.free_kv_tokens)


def _encode_step(message: Step) -> Parts:
    flags = Flag(0)
    if message.last_token_only:
        flags |= Flag.LAST_TOKEN_ONLY
    if message.is_decoded:
        flags |= Flag.IS_DECODED
    if message.is_piece:
        flags |= Flag.IS_PIECE
    control = b""
    if message.row_map is not None or message.before:
        before = chain.encode_before(message.before)
        control = pb.StepBody(row_map=message.row_map, before_seconds=before).SerializeToString()
    return Parts(
        Kind.STEP, message.session, message.epoch, message.sequence, message.position,
        flags, control, message.hidden,
    )  # fmt: skip


def _decode_step(parts: Parts) -> Step:
    hidden = _tensor(parts)
    row_map, before = None, ()
    if parts.control:
        body = _parse(pb.StepBody(), parts)
        row_map, before = tuple(body.row_map) or None, chain.decode_before(body.before_seconds)
        if row_map is None and not before:
            raise ValueError("its control part has no row map and no times")
    return Step(
        _session(parts),
        parts.epoch,
        parts.sequence,
        parts.position,
        hidden,
        row_map,
        is_decoded=bool(parts.flags & Flag.IS_DECODED),
        last_token_only=bool(parts.flags & Flag.LAST_TOKEN_ONLY),
        is_piece=bool(parts.flags & Flag.IS_PIECE),
        before=before,
    )


def _encode_output(message: Output) -> Parts:
    body = pb.OutputBody(
        queue_seconds=message.queue_seconds,
        compute_seconds=message.compute_seconds,
        before_seconds=chain.encode_before(message.before),
    )
    return Parts(
        Kind.OUTPUT, message.session, message.epoch, message.sequence, message.position,
        control=body.SerializeToString(), tensor=message.hidden,
    )  # fmt: skip


def _decode_output(parts: Parts) -> Output:
    body = _parse(pb.OutputBody(), parts)
    return Output(
        _session(parts),
        parts.epoch,
        parts.sequence,
        parts.position,
        _tensor(parts),
        body.queue_seconds,
        body.compute_seconds,
        chain.decode_before(body.before_seconds),
    )


def _encode_gap(message: Gap) -> Parts:
    return Parts(Kind.GAP, message.session, message.epoch, message.sequence, message.length)


def _decode_gap(parts: Parts) -> Gap:
    return Gap(_session(parts), parts.epoch, parts.sequence, parts.position)


def _encode_declined(message: Declined) -> Parts:
    body = pb.DeclinedBody(
        code=message.code,
        detail=clean_text(message.detail),
        retry_after_seconds=message.retry_after_seconds,
        whole_stream=message.session is None,
    )
    session = message.session if message.session is not None else NO_SESSION
    return Parts(
        Kind.DECLINED, session, sequence=message.sequence, control=body.SerializeToString()
    )


def _decode_declined(parts: Parts) -> Declined:
    body = _parse(pb.DeclinedBody(), parts)
    if body.whole_stream and parts.session != NO_SESSION:
        raise ValueError("it speaks of one session and of the whole stream")
    check_text(body.detail)
    return Declined(
        None if body.whole_stream else _session(parts),
        parts.sequence,
        ErrorCode(body.code),
        body.detail,
        body.retry_after_seconds if body.HasField("retry_after_seconds") else None,
    )


class _Codec(NamedTuple):
    """Both ways of one kind; `unused` are the fields of a frame that it must leave empty."""

    kind: Kind
    type: type[Message]
    encode: Callable[[Any], Parts]
    decode: Callable[[Parts], Message]
    unused: tuple[str, ...]


def _make_bare_codec(kind: Kind, bare: type[Close | Probe | Leaving]) -> _Codec:
    """Return both ways of a kind that names a session and says nothing more."""

    def encode(message: Close | Probe | Leaving) -> Parts:
        return Parts(kind, message.session, message.epoch)

    def decode(parts: Parts) -> Message:
        return bare(_session(parts), parts.epoch)

    return _Codec(kind, bare, encode, decode, (*_SESSION, "control"))


_STREAM = ("session", "epoch", "sequence", "position", "flags")
_SESSION = ("sequence", "position", "flags")
_REFUSAL = ("epoch", "position", "flags")
_PIECE = ("epoch", "flags", "control")
_ADAPTER = ("epoch", *_SESSION)

# Both ways of every kind in one table.
CODECS = (
    _Codec(Kind.HELLO, Hello, _encode_hello, _decode_hello, _STREAM),
    _Codec(Kind.WELCOME, Welcome, _encode_welcome, _decode_welcome, _STREAM),
    _Codec(Kind.OPEN, Open, _encode_open, _decode_open, _SESSION),
    _Codec(Kind.OPENED, Opened, _encode_opened, _decode_opened, _SESSION),
    _Codec(Kind.STEP, Step, _encode_step, _decode_step, ()),
    _Codec(Kind.OUTPUT, Output, _encode_output, _decode_output, ("flags",)),
    _Codec(Kind.GAP, Gap, _encode_gap, _decode_gap, ("flags", "control")),
    _make_bare_codec(Kind.CLOSE, Close),
    _Codec(Kind.DECLINED, Declined, _encode_declined, _decode_declined, _REFUSAL),
    _Codec(Kind.QUEUED, Queued, _encode_queued, _decode_queued, _SESSION),
    _Codec(Kind.ATTACH, Attach, chain.encode_capability, chain.decode_attach, _SESSION),
    _Codec(Kind.ADMIT, Admit, chain.encode_capability, chain.decode_admit, _SESSION),
    _Codec(
        Kind.REDIRECT, Redirect, chain.encode_redirect, chain.decode_redirect, ("position", "flags")
    ),
    _make_bare_codec(Kind.PROBE, Probe),
    _Codec(Kind.STATUS, Status, chain.encode_status, chain.decode_status, ("flags",)),
    _make_bare_codec(Kind.LEAVING, Leaving),
    _Codec(Kind.MIRROR, Mirror, chain.encode_mirror, chain.decode_mirror, _SESSION),
    _Codec(Kind.OFFER, Offer, encode_offer, decode_offer, _STREAM),
    _Codec(Kind.PARKED, Parked, encode_parked, decode_parked, (*_STREAM, "control")),
    _Codec(Kind.PASS, Pass, passes.encode_pass, passes.decode_pass, ("epoch", *_SESSION)),
    _Codec(Kind.PASS_PIECE, PassPiece, passes.encode_piece, passes.decode_piece, _PIECE),
    _Codec(Kind.PASSED, Passed, passes.encode_passed, passes.decode_passed, ("epoch", *_SESSION)),
    *(_Codec(*entry, _ADAPTER) for entry in adapters.TABLE),
    _Codec(
        Kind.ADAPTER_PIECE,
        AdapterPiece,
        adapters.encode_adapter_piece,
        adapters.decode_adapter_piece,
        ("epoch", "sequence", "flags"),
    ),
)
_CODEC_OF_TYPE = {codec.type: codec for codec in CODECS}
_CODEC_OF_KIND = {codec.kind: codec for codec in CODECS}
