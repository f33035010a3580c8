"""Messages to frames and back, generated from the declared fields of every message.

A frame is one fixed header, a protobuf part and raw tensor bytes:

    0  magic "sh"   2  frame version   3  kind        4  flags
    6  dtype        7  codec           8  session (16 bytes)
   24  epoch       28  sequence       36  position
   40  rows        44  tokens         48  width
   52  control length                 56  tensor length
   60  control (protobuf)             60 + control length  tensor

Numbers are unsigned and little-endian. Fields that a message has no use for are zero. Every
length is checked against the frame and against the shape before anything is read or allocated.

The schema of the protobuf part is the declarations; `docs/protocol.md` shows it as protobuf writes
it.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from .. import limits
from ..errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from ..ids import NO_SESSION, SessionId
from ..tensors import WireDtype, WireTensor, check_tensor
from . import adapters, passes, records, reverse_connections, runs
from . import session as sessions
from .fields import (
    Body,
    Field,
    Flag,
    Header,
    Message,
    Spread,
    check_fields,
    list_fields,
)

FRAME_VERSION = 1
_RAW_CODEC = 1
"""How the elements of a tensor are laid out: there is one way so far."""

_MAGIC = b"sh"
_HEADER = struct.Struct("<2sBBHBB16sIQIIIIII")
HEADER_BYTES = _HEADER.size

_HEADER_FIELDS = ("session", "epoch", "sequence", "position", "tensor")
_EMPTY_HEADER = (NO_SESSION, 0, 0, 0, None)
"""The header fields of a message, and the values of those that it does not use."""

_PACKAGE = "shoal.v1"

Kind = TypeVar("Kind", bound=Message)

_Values = dict[str, Any]


def encode_frame(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises LocalProtocolError when the other end would not accept them.
    """
    try:
        check_fields(message)
        return CODECS[message.KIND].encode(message)
    except (ValueError, struct.error) as error:
        name = type(message).__name__
        raise LocalProtocolError(f"this {name} cannot be sent: {error}") from error


def read_kind(frame: bytes) -> int:
    """Return the kind of the message in a valid frame.

    >>> from ..messages.session import Welcome
    >>> read_kind(b"sh\\x01\\x02") == Welcome.KIND
    True
    """
    return frame[3]


def decode_frame(frame: bytes) -> Message:
    """Return the message of a frame. Tensor bytes are a view into the frame, not a copy.

    Raises RemoteProtocolError, and nothing else, for whatever a stranger may have sent.
    """
    if not HEADER_BYTES <= len(frame) <= limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes is outside the allowed sizes")
    (magic, version, kind, flags, dtype, layout, *header,
     rows, tokens, width, control_length, tensor_length) = _HEADER.unpack_from(frame)  # fmt: skip
    if magic != _MAGIC:
        raise RemoteProtocolError("the frame does not begin like one of shoal's")
    if version != FRAME_VERSION:
        raise RemoteProtocolError(f"frame version {version} is not {FRAME_VERSION}")
    if flags & ~_FLAGS:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if control_length > limits.MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"a control part of {control_length} bytes is too large")
    if HEADER_BYTES + control_length + tensor_length != len(frame):
        raise RemoteProtocolError(
            f"the header speaks of {control_length} + {tensor_length} bytes, "
            f"{len(frame) - HEADER_BYTES} follow"
        )
    codec = CODECS.get(kind)
    if codec is None:
        raise RemoteProtocolError(f"unknown frame kind {kind}")
    tensor = None
    if codec.has_tensor:
        data = memoryview(frame)[HEADER_BYTES + control_length :]
        tensor = read_tensor(dtype, layout, (rows, tokens, width), data)
    elif tensor_length or rows or tokens or width or dtype or layout:
        raise RemoteProtocolError(f"a {codec.message.NAME} frame carries no tensor")
    control = frame[HEADER_BYTES : HEADER_BYTES + control_length]
    codec.check_unused(header, flags, control)
    try:
        message = codec.decode((*header, tensor), flags, control)
        check_fields(message)
    except ValueError as error:
        raise RemoteProtocolError(f"damaged {codec.message.NAME} frame: {error}") from None
    return message


def read_answer(frame: bytes | None, name: str, session: SessionId | None = None) -> Message:
    """Return the message of a frame that a peer answered with; None is the end of the stream.

    Raises UnavailableError for the end, RemoteProtocolError for a damaged frame, and the error of a
    peer that declined.
    """
    if frame is None:
        raise UnavailableError(f"{name} ended the stream")
    message = decode_frame(frame)
    if isinstance(message, sessions.Declined):
        raise message.make_error(name, session)
    return message


def check_kind(message: Message, kind: type[Kind], name: str) -> Kind:
    """Return a message of the peer of this name if it is of a kind; RemoteProtocolError if not."""
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{name} answered with {message!r:.80}, not {kind.__name__}")
    return message


def read_tensor(
    dtype: int, layout: int, shape: tuple[int, int, int], data: memoryview
) -> WireTensor:
    """Check codes, shape and length against each other and return the tensor, without a copy.

    Raises RemoteProtocolError: the other end wrote these numbers.

    >>> read_tensor(1, 1, (1, 1, 2), memoryview(bytes(8))).shape
    (1, 1, 2)
    """
    try:
        tensor = WireTensor(WireDtype(dtype), *shape, data)
        if layout != _RAW_CODEC:
            raise ValueError(f"{layout} is not a valid WireCodec")
        check_tensor(tensor)
    except ValueError as error:
        raise RemoteProtocolError(f"malformed tensor: {error}") from None
    return tensor


class Codec:
    """Both ways of one message: which field of the frame holds what."""

    def __init__(self, message: type[Message]) -> None:
        self.message = message
        self._header: list[tuple[int, str, type[IntEnum] | None]] = []
        self.flags: list[tuple[str, int]] = []
        has_body = False
        for field in list_fields(message):
            match field.location:
                case Header(name):
                    kind = field.kind if issubclass(field.kind, IntEnum) else None
                    self._header.append((_HEADER_FIELDS.index(name), field.name, kind))
                case Flag(bit):
                    self.flags.append((field.name, bit))
                case Body() | Spread():
                    has_body = True
        self.body = BodyCodec(message) if has_body else None
        used = {index for index, _, _ in self._header}
        self.has_tensor = _HEADER_FIELDS.index("tensor") in used
        self._unused = [index for index in range(len(_HEADER_FIELDS) - 1) if index not in used]

    def encode(self, message: Message) -> bytes:
        """Return the frame. Raises ValueError and struct.error for what fits into none."""
        header_fields: list[Any] = [*_EMPTY_HEADER]
        for index, attribute, _ in self._header:
            value = getattr(message, attribute)
            if value is not None:
                header_fields[index] = value
        flags = 0
        for attribute, bit in self.flags:
            if getattr(message, attribute):
                flags |= bit
        control = b"" if self.body is None else self.body.write(message)
        *header, tensor = header_fields
        dtype = layout = rows = tokens = width = 0
        data: bytes | memoryview = b""
        if tensor is not None:
            dtype, rows, tokens, width = tensor.dtype, tensor.rows, tensor.tokens, tensor.width
            layout, data = _RAW_CODEC, memoryview(tensor.data).cast("B")
        if HEADER_BYTES + len(control) + len(data) > limits.MAX_FRAME_BYTES:
            raise ValueError(
                f"{len(data)} tensor bytes do not fit into one frame of "
                f"{limits.MAX_FRAME_BYTES} bytes; send fewer tokens at once"
            )
        packed = _HEADER.pack(
            _MAGIC, FRAME_VERSION, self.message.KIND, flags, dtype, layout, *header,
            rows, tokens, width, len(control), len(data),
        )  # fmt: skip
        return b"".join((packed, control, data))

    def check_unused(self, header: list[Any], flags: int, control: bytes) -> None:
        """Raise RemoteProtocolError for a field of the frame that this message does not have."""
        named = [
            _HEADER_FIELDS[index] for index in self._unused if header[index] != _EMPTY_HEADER[index]
        ]
        if flags and not self.flags:
            named.append("flags")
        if control and self.body is None:
            named.append("control")
        if named:
            raise RemoteProtocolError(f"a {self.message.NAME} frame has no {named[0]}")

    def decode(self, header_fields: tuple[Any, ...], flags: int, control: bytes) -> Message:
        """Return the message that a stranger wrote, not yet checked. May raise ValueError."""
        values: _Values = {}
        for index, attribute, kind in self._header:
            value = header_fields[index]
            values[attribute] = value if kind is None else kind(value)
        for attribute, bit in self.flags:
            values[attribute] = bool(flags & bit)
        if self.body is not None:
            values.update(self.body.read(control))
        return self.message.read(values)


class BodyCodec:
    """Writes the fields of one message that stand in its protobuf part, and reads them."""

    def __init__(self, message: type[Message]) -> None:
        fields = [
            field for field in list_fields(message) if isinstance(field.location, Body | Spread)
        ]
        name = f"{message.__name__}Body"
        self.descriptor = _describe(name, f".{_PACKAGE}.{name}", fields)
        # A pool of its own: no name can be taken, by another message or by another library.
        pool = DescriptorPool()
        file = FileDescriptorProto(name=f"{name}.proto", package=_PACKAGE, syntax="proto3")
        file.message_type.append(self.descriptor)
        pool.AddSerializedFile(file.SerializeToString())
        self.type: Any = GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        self._write, self._read = _make_writer(fields), _make_reader(fields)

    def write(self, message: Message) -> bytes:
        """Return the protobuf part of a message. Raises ValueError for what does not fit."""
        values = self._write(message)
        return self.type(**values).SerializeToString() if values else b""  # nearly every step

    @cached_property
    def _empty(self) -> _Values:
        return self._read(self.type())

    def read(self, control: bytes) -> _Values:
        """Return the fields in a protobuf part. Raises ValueError for what is none."""
        if not control:
            return self._empty
        body = self.type()
        try:
            body.ParseFromString(control)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        return self._read(body)


def _is_marked(field: Field) -> bool:
    """Return whether protobuf says if the field is there; empty bytes stand for no field."""
    assert isinstance(field.location, Body)
    return field.is_optional and not field.repeats and field.location.scalar != "bytes"


def _describe(name: str, path: str, fields: Iterable[Field]) -> DescriptorProto:
    """Return how protobuf describes a body; records are described inside of it."""
    described = DescriptorProto(name=name)
    for part_name, field, location in _list_locations(fields):
        added = described.field.add(name=part_name, number=location.number)
        label = "LABEL_REPEATED" if field.repeats else "LABEL_OPTIONAL"
        added.label = FieldDescriptorProto.Label.Value(label)
        if location.scalar is None:
            record = f"{field.kind.__name__}Body"
            added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{path}.{record}"
            if record not in {nested.name for nested in described.nested_type}:
                parts = _describe(record, added.type_name, field.list_parts())
                described.nested_type.append(parts)
            continue
        added.type = FieldDescriptorProto.Type.Value(f"TYPE_{location.scalar.upper()}")
        if _is_marked(field):
            added.proto3_optional, added.oneof_index = True, len(described.oneof_decl)
            described.oneof_decl.add(name=f"_{part_name}")
    return described


def _list_locations(fields: Iterable[Field]) -> Iterator[tuple[str, Field, Body]]:
    """Yield each field of a body with the name that it has there."""
    for field in fields:
        if isinstance(field.location, Body):
            yield field.name, field, field.location
        else:
            for name, part, location in _list_locations(field.list_parts()):
                yield f"{field.name}_{name}", part, location


def _make_writer(fields: Iterable[Field], prefix: str = "") -> Callable[[Any], _Values]:
    """Return what takes the values of a body out of a message or record, but for absent ones."""
    plain: list[tuple[str, str, Callable[[Any], Any] | None]] = []
    spread: list[tuple[str, Callable[[Any], _Values]]] = []
    for field in fields:
        name = prefix + field.name
        if isinstance(field.location, Body):
            plain.append((name, field.name, _choose_writer(field, field.location)))
        else:
            spread.append((field.name, _make_writer(field.list_parts(), f"{name}_")))

    def write(value: Any) -> _Values:
        values: _Values = {}
        for name, attribute, convert in plain:
            part = getattr(value, attribute)
            if part is not None and part != ():
                values[name] = part if convert is None else convert(part)
        for attribute, write_parts in spread:
            values.update(write_parts(getattr(value, attribute)))
        return values

    return write


def _choose_writer(field: Field, location: Body) -> Callable[[Any], Any] | None:
    """Return what converts a value that is there for protobuf."""
    if location.scalar is not None:
        return location.write
    write = _make_writer(field.list_parts())
    return (lambda parts: [write(part) for part in parts]) if field.repeats else write


def _make_reader(fields: Iterable[Field], prefix: str = "") -> Callable[[Any], _Values]:
    """Return what takes the fields of a message or record out of a body."""
    readers: list[tuple[str, Callable[[Any], Any]]] = []
    for field in fields:
        name = prefix + field.name
        if isinstance(field.location, Body):
            readers.append((field.name, _choose_reader(field, field.location, name)))
        else:
            readers.append((field.name, _make_record_reader(field, f"{name}_")))
    return lambda body: {name: read(body) for name, read in readers}


def _make_record_reader(field: Field, prefix: str = "") -> Callable[[Any], Any]:
    kind, read = field.kind, _make_reader(field.list_parts(), prefix)
    return lambda body: kind(**read(body))


def _choose_reader(field: Field, location: Body, name: str) -> Callable[[Any], Any]:
    """Return what takes one field out of a body, where it has this name."""
    convert = _choose_converter(field, location)
    take: Callable[[Any], Any] = attrgetter(name)
    if _is_marked(field):
        return lambda body: convert(take(body)) if body.HasField(name) else None
    if field.is_optional:
        return lambda body: convert(take(body)) or None
    return take if convert is _keep else lambda body: convert(take(body))


def _choose_converter(field: Field, location: Body) -> Callable[[Any], Any]:
    """Return what makes a value of a message of what protobuf has."""
    if location.read is not None:
        return location.read
    convert = _keep
    if location.scalar is None:
        convert = _make_record_reader(field)
    elif issubclass(field.kind, IntEnum):
        convert = field.kind
    if not field.repeats:
        return convert
    return tuple if convert is _keep else lambda values: tuple(map(convert, values))


def _keep(value: Any) -> Any:
    return value


def _list_messages() -> Iterator[type[Message]]:
    """Yield every message that a module of a conversation declares."""
    for module in (sessions, passes, adapters, reverse_connections, records, runs):
        for value in vars(module).values():
            is_message = isinstance(value, type) and issubclass(value, Message)
            if is_message and value.__module__ == module.__name__:
                yield value


def _make_codecs() -> dict[int, Codec]:
    codecs: dict[int, Codec] = {}
    for message in _list_messages():
        codec = codecs.setdefault(message.KIND, Codec(message))
        if codec.message is not message:
            raise TypeError(f"{message.NAME} and {codec.message.NAME} are of one kind")
    return codecs


CODECS = _make_codecs()
"""Both ways of every message, by its kind."""

_FLAGS = sum({bit for codec in CODECS.values() for _, bit in codec.flags})
