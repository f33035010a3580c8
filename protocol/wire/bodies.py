"""The protobuf parts of frames, made from the declared fields of messages.

The schema is the declarations: `docs/protocol.md` shows it as protobuf writes it.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from operator import attrgetter
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ..messages.fields import Body, Field, Message, Spread, list_fields

_PACKAGE = "shoal.v1"

_Values = dict[str, Any]


class BodyCodec:
    """Writes the fields of one message that stand in its protobuf part, and reads them."""

    def __init__(self, message: type[Message]) -> None:
        fields = [field for field in list_fields(message) if isinstance(field.place, Body | Spread)]
        name = f"{message.__name__}Body"
        self.descriptor = _describe(name, f".{_PACKAGE}.{name}", fields)
        # A pool of its own: no name can be taken, by another message or by another library.
        pool = DescriptorPool()
        file = FileDescriptorProto(name=f"{name}.proto", package=_PACKAGE, syntax="proto3")
        file.message_type.append(self.descriptor)
        pool.AddSerializedFile(file.SerializeToString())
        self.type: Any = GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        self._write, self._read = _make_writer(fields), _make_reader(fields)
        self._may_be_empty = bool(message.EMPTY_BODY)

    def write(self, message: Message) -> bytes:
        """Return the protobuf part of a message. Raises ValueError for what does not fit."""
        values = self._write(message)
        if self._may_be_empty and not any(values.values()):
            return b""  # nearly every step
        return self.type(**values).SerializeToString()

    def read(self, control: bytes) -> _Values:
        """Return the fields in a protobuf part. Raises ValueError for what is none."""
        body = self.type()
        try:
            body.ParseFromString(control)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        return self._read(body)


def _is_marked(field: Field) -> bool:
    """Return whether protobuf says if the field is there; empty bytes stand for no field."""
    assert isinstance(field.place, Body)
    return field.is_optional and not field.repeats and field.place.scalar != "bytes"


def _describe(name: str, path: str, fields: Iterable[Field]) -> DescriptorProto:
    """Return how protobuf describes a body; records are described inside of it."""
    described = DescriptorProto(name=name)
    for part_name, field, place in _list_places(fields):
        added = described.field.add(name=part_name, number=place.number)
        label = "LABEL_REPEATED" if field.repeats else "LABEL_OPTIONAL"
        added.label = FieldDescriptorProto.Label.Value(label)
        if place.scalar is None:
            record = f"{field.kind.__name__}Body"
            added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{path}.{record}"
            parts = _describe(record, added.type_name, field.list_parts())
            described.nested_type.append(parts)
            continue
        added.type = FieldDescriptorProto.Type.Value(f"TYPE_{place.scalar.upper()}")
        if _is_marked(field):
            added.proto3_optional, added.oneof_index = True, len(described.oneof_decl)
            described.oneof_decl.add(name=f"_{part_name}")
    return described


def _list_places(fields: Iterable[Field]) -> Iterator[tuple[str, Field, Body]]:
    """Yield each field of a body with the name that it has there."""
    for field in fields:
        if isinstance(field.place, Body):
            yield field.name, field, field.place
        else:
            for name, part, place in _list_places(field.list_parts()):
                yield f"{field.name}_{name}", part, place


def _make_writer(fields: Iterable[Field], prefix: str = "") -> Callable[[Any], _Values]:
    """Return what takes the values of a body out of a message or record."""
    plain: list[tuple[str, str, Callable[[Any], Any] | None]] = []
    spread: list[tuple[str, Callable[[Any], _Values]]] = []
    for field in fields:
        name = prefix + field.name
        if isinstance(field.place, Body):
            plain.append((name, field.name, _choose_writer(field, field.place)))
        else:
            spread.append((field.name, _make_writer(field.list_parts(), f"{name}_")))

    def write(value: Any) -> _Values:
        values: _Values = {}
        for name, attribute, convert in plain:
            part = getattr(value, attribute)
            values[name] = part if convert is None or part is None else convert(part)
        for attribute, write_parts in spread:
            values.update(write_parts(getattr(value, attribute)))
        return values

    return write


def _choose_writer(field: Field, place: Body) -> Callable[[Any], Any] | None:
    """Return what converts a value for protobuf, which takes None for a field that is not there."""
    if place.scalar is not None:
        return place.write
    write = _make_writer(field.list_parts())
    return (lambda parts: [write(part) for part in parts]) if field.repeats else write


def _make_reader(fields: Iterable[Field], prefix: str = "") -> Callable[[Any], _Values]:
    """Return what takes the fields of a message or record out of a body."""
    readers: list[tuple[str, Callable[[Any], Any]]] = []
    for field in fields:
        name = prefix + field.name
        if isinstance(field.place, Body):
            readers.append((field.name, _choose_reader(field, field.place, name)))
        else:
            readers.append((field.name, _make_record_reader(field, f"{name}_")))
    return lambda body: {name: read(body) for name, read in readers}


def _make_record_reader(field: Field, prefix: str = "") -> Callable[[Any], Any]:
    kind, read = field.kind, _make_reader(field.list_parts(), prefix)
    return lambda body: kind(**read(body))


def _choose_reader(field: Field, place: Body, name: str) -> Callable[[Any], Any]:
    """Return what takes one field out of a body, where it has this name."""
    convert = _choose_converter(field, place)
    take: Callable[[Any], Any] = attrgetter(name)
    if _is_marked(field):
        return lambda body: convert(take(body)) if body.HasField(name) else None
    if field.is_optional:
        return lambda body: convert(take(body)) or None
    return take if convert is _keep else lambda body: convert(take(body))


def _choose_converter(field: Field, place: Body) -> Callable[[Any], Any]:
    """Return what makes a value of a message of what protobuf has."""
    if place.read is not None:
        return place.read
    convert = _keep
    if place.scalar is None:
        convert = _make_record_reader(field)
    elif issubclass(field.kind, IntEnum):
        convert = field.kind
    if not field.repeats:
        return convert
    return tuple if convert is _keep else lambda values: tuple(map(convert, values))


def _keep(value: Any) -> Any:
    return value
