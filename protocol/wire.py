"""Messages to frames and back: one fixed header, a protobuf part, raw tensor bytes.

    0  magic "sh"   2  frame version   3  kind        4  flags
    6  dtype        7  codec           8  session (16 bytes)
   24  epoch       28  sequence       36  position
   40  rows        44  tokens         48  width
   52  control length                 56  tensor length
   60  control (protobuf)             60 + control length  tensor

Numbers are unsigned and little-endian. Fields that a message has no use for are zero. Every
length is checked against the frame and against the shape before anything is read or allocated.
"""

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from . import limits
from .errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from .ids import ClientToken, ModelId, PeerId, SessionId
from .message_checks import NO_SESSION, check_message, check_text, clean_text
from .messages import (
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
from .proto import wire_pb2 as pb
from .spans import Span
from .tensors import WireDtype, WireTensor, read_tensor

FRAME_VERSION = 1
_MAGIC = b"sh"
_HEADER = struct.Struct("<2sBBHBB16sIQIIIIII")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """Which message a frame carries."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    OPENED = 4
    STEP = 5
    OUTPUT = 6
    GAP = 7
    CLOSE = 8
    DECLINED = 9
    QUEUED = 10


class _Flag(IntFlag):
    LAST_TOKEN_ONLY = 1
    IS_DECODED = 2


_ALL_FLAGS = int(_Flag.LAST_TOKEN_ONLY | _Flag.IS_DECODED)  # ~ of an IntFlag knows no others


class _Parts(NamedTuple):
    """The fields of a frame; `control` is protobuf, `tensor` a whole tensor or None."""

    kind: Kind
    session: bytes = NO_SESSION
    epoch: int = 0
    sequence: int = 0
    position: int = 0
    flags: int = 0
    control: bytes | memoryview = b""
    tensor: WireTensor | None = None


def encode_frame(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises LocalProtocolError when the other end would not accept them.
    """
    try:
        check_message(message)
        parts = _CODEC_OF_TYPE[type(message)].encode(message)
        return _join(parts)
    except (ValueError, struct.error) as error:
        name = type(message).__name__
        raise LocalProtocolError(f"this {name} cannot be sent: {error}") from error


def decode_frame(frame: bytes) -> Message:
    """Return the message of a frame. Tensor bytes are a view into the frame, not a copy.

    Raises RemoteProtocolError, and nothing else, for whatever a stranger may have sent.
    """
    parts = _split(frame)
    try:
        message = _CODEC_OF_KIND[parts.kind].decode(parts)
        check_message(message)
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"damaged {parts.kind.name} frame: {error}") from None
    return message


def _join(parts: _Parts) -> bytes:
    tensor = parts.tensor
    codes, shape, data = (0, 0), (0, 0, 0), b""
    if tensor is not None:
        codes, shape, data = (tensor.dtype, tensor.codec), tensor.shape, memoryview(tensor.data)
    num_bytes = memoryview(data).nbytes
    if HEADER_BYTES + len(parts.control) + num_bytes > limits.MAX_FRAME_BYTES:
        raise ValueError(
            f"{num_bytes} tensor bytes do not fit into one frame of "
            f"{limits.MAX_FRAME_BYTES} bytes; send fewer tokens at once"
        )
    header = _HEADER.pack(
        _MAGIC, FRAME_VERSION, parts.kind, parts.flags, *codes, parts.session,
        parts.epoch, parts.sequence, parts.position, *shape, len(parts.control), num_bytes,
    )  # fmt: skip
    return b"".join((header, parts.control, data))


def _split(frame: bytes) -> _Parts:
    if not HEADER_BYTES <= len(frame) <= limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes is outside the allowed sizes")
    (magic, version, kind, flags, dtype, codec, session, epoch, sequence, position,
     rows, tokens, width, control_length, tensor_length) = _HEADER.unpack_from(frame)  # fmt: skip
    if magic != _MAGIC:
        raise RemoteProtocolError("the frame does not begin like one of shoal's")
    if version != FRAME_VERSION:
        raise RemoteProtocolError(f"frame version {version} is not {FRAME_VERSION}")
    if flags & ~_ALL_FLAGS:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if control_length > limits.MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"a control part of {control_length} bytes is too large")
    if HEADER_BYTES + control_length + tensor_length != len(frame):
        raise RemoteProtocolError(
            f"the header speaks of {control_length} + {tensor_length} bytes, "
            f"{len(frame) - HEADER_BYTES} follow"
        )
    try:
        kind = Kind(kind)
    except ValueError:
        raise RemoteProtocolError(f"unknown frame kind {kind}") from None
    view = memoryview(frame)[HEADER_BYTES:]
    tensor = None
    if kind in (Kind.STEP, Kind.OUTPUT):
        tensor = read_tensor(dtype, codec, (rows, tokens, width), view[control_length:])
    elif tensor_length or rows or tokens or width or dtype or codec:
        raise RemoteProtocolError(f"a {kind.name} frame carries no tensor")
    control = view[:control_length]
    parts = _Parts(kind, session, epoch, sequence, position, flags, control, tensor)
    for name in _CODEC_OF_KIND[kind].unused:
        if getattr(parts, name) != _Parts._field_defaults[name]:
            raise RemoteProtocolError(f"a {kind.name} frame has no {name}")
    return parts


_Body = TypeVar("_Body", bound=ProtobufMessage)


def _parse(body: _Body, parts: _Parts) -> _Body:
    body.ParseFromString(bytes(parts.control))
    return body


def _session(parts: _Parts) -> SessionId:
    return SessionId(parts.session)


def _tensor(parts: _Parts) -> WireTensor:
    assert parts.tensor is not None  # _split made sure
    return parts.tensor


def _encode_hello(message: Hello) -> _Parts:
    body = pb.HelloBody(
        min_version=message.min_version,
        max_version=message.max_version,
        software=message.software,
        client=message.client,
    )
    return _Parts(Kind.HELLO, control=body.SerializeToString())


def _decode_hello(parts: _Parts) -> Hello:
    body = _parse(pb.HelloBody(), parts)
    return Hello(body.min_version, body.max_version, body.software, ClientToken(body.client))


def _encode_welcome(message: Welcome) -> _Parts:
    body = pb.WelcomeBody(
        version=message.version,
        software=message.software,
        peer_id=message.peer_id,
        model_id=message.model_id,
        span_start=message.span.start,
        span_stop=message.span.stop,
        wall_seconds=message.wall_seconds,
    )
    return _Parts(Kind.WELCOME, control=body.SerializeToString())


def _decode_welcome(parts: _Parts) -> Welcome:
    body = _parse(pb.WelcomeBody(), parts)
    return Welcome(
        body.version,
        body.software,
        PeerId(body.peer_id),
        ModelId(body.model_id),
        Span(body.span_start, body.span_stop),
        body.wall_seconds,
    )


def _encode_open(message: Open) -> _Parts:
    body = pb.OpenBody(
        model_id=message.model_id,
        span_start=message.span.start,
        span_stop=message.span.stop,
        num_rows=message.num_rows,
        max_tokens=message.max_tokens,
        dtype=message.dtype,
        max_wait_seconds=message.max_wait_seconds,
    )
    return _Parts(Kind.OPEN, message.session, message.epoch, control=body.SerializeToString())


def _decode_open(parts: _Parts) -> Open:
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
    )


def _encode_queued(message: Queued) -> _Parts:
    body = pb.QueuedBody(wait_seconds=message.wait_seconds)
    return _Parts(Kind.QUEUED, message.session, message.epoch, control=body.SerializeToString())


def _decode_queued(parts: _Parts) -> Queued:
    body = _parse(pb.QueuedBody(), parts)
    return Queued(_session(parts), parts.epoch, body.wait_seconds)


def _encode_opened(message: Opened) -> _Parts:
    body = pb.OpenedBody(queue_seconds=message.queue_seconds, free_kv_tokens=message.free_kv_tokens)
    return _Parts(Kind.OPENED, message.session, message.epoch, control=body.SerializeToString())


def _decode_opened(parts: _Parts) -> Opened:
    body = _parse(pb.OpenedBody(), parts)
    return Opened(_session(parts), parts.epoch, body.queue_seconds, body.free_kv_tokens)


def _encode_step(message: Step) -> _Parts:
    flags = _Flag(0)
    if message.last_token_only:
        flags |= _Flag.LAST_TOKEN_ONLY
    if message.is_decoded:
        flags |= _Flag.IS_DECODED
    control = b""
    if message.row_map is not None:
        control = pb.StepBody(row_map=message.row_map).SerializeToString()
    return _Parts(
        Kind.STEP, message.session, message.epoch, message.sequence, message.position,
        flags, control, message.hidden,
    )  # fmt: skip


def _decode_step(parts: _Parts) -> Step:
    hidden = _tensor(parts)
    row_map = None
    if parts.control:
        row_map = tuple(_parse(pb.StepBody(), parts).row_map)
    return Step(
        _session(parts),
        parts.epoch,
        parts.sequence,
        parts.position,
        hidden,
        row_map,
        is_decoded=bool(parts.flags & _Flag.IS_DECODED),
        last_token_only=bool(parts.flags & _Flag.LAST_TOKEN_ONLY),
    )


def _encode_output(message: Output) -> _Parts:
    body = pb.OutputBody(
        queue_seconds=message.queue_seconds, compute_seconds=message.compute_seconds
    )
    return _Parts(
        Kind.OUTPUT, message.session, message.epoch, message.sequence, message.position,
        control=body.SerializeToString(), tensor=message.hidden,
    )  # fmt: skip


def _decode_output(parts: _Parts) -> Output:
    body = _parse(pb.OutputBody(), parts)
    return Output(
        _session(parts),
        parts.epoch,
        parts.sequence,
        parts.position,
        _tensor(parts),
        body.queue_seconds,
        body.compute_seconds,
    )


def _encode_gap(message: Gap) -> _Parts:
    return _Parts(Kind.GAP, message.session, message.epoch, message.sequence, message.length)


def _decode_gap(parts: _Parts) -> Gap:
    return Gap(_session(parts), parts.epoch, parts.sequence, parts.position)


def _encode_close(message: Close) -> _Parts:
    return _Parts(Kind.CLOSE, message.session, message.epoch)


def _decode_close(parts: _Parts) -> Close:
    return Close(_session(parts), parts.epoch)


def _encode_declined(message: Declined) -> _Parts:
    body = pb.DeclinedBody(
        code=message.code,
        detail=clean_text(message.detail),
        retry_after_seconds=message.retry_after_seconds,
        whole_stream=message.session is None,
    )
    session = message.session if message.session is not None else NO_SESSION
    return _Parts(
        Kind.DECLINED, session, sequence=message.sequence, control=body.SerializeToString()
    )


def _decode_declined(parts: _Parts) -> Declined:
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
    encode: Callable[[Any], _Parts]
    decode: Callable[[_Parts], Message]
    unused: tuple[str, ...]


_STREAM = ("session", "epoch", "sequence", "position", "flags")
_SESSION = ("sequence", "position", "flags")
_REFUSAL = ("epoch", "position", "flags")

# Both ways of every kind in one table.
CODECS = (
    _Codec(Kind.HELLO, Hello, _encode_hello, _decode_hello, _STREAM),
    _Codec(Kind.WELCOME, Welcome, _encode_welcome, _decode_welcome, _STREAM),
    _Codec(Kind.OPEN, Open, _encode_open, _decode_open, _SESSION),
    _Codec(Kind.OPENED, Opened, _encode_opened, _decode_opened, _SESSION),
    _Codec(Kind.STEP, Step, _encode_step, _decode_step, ()),
    _Codec(Kind.OUTPUT, Output, _encode_output, _decode_output, ("flags",)),
    _Codec(Kind.GAP, Gap, _encode_gap, _decode_gap, ("flags", "control")),
    _Codec(Kind.CLOSE, Close, _encode_close, _decode_close, (*_SESSION, "control")),
    _Codec(Kind.DECLINED, Declined, _encode_declined, _decode_declined, _REFUSAL),
    _Codec(Kind.QUEUED, Queued, _encode_queued, _decode_queued, _SESSION),
)
_CODEC_OF_TYPE = {codec.type: codec for codec in CODECS}
_CODEC_OF_KIND = {codec.kind: codec for codec in CODECS}
