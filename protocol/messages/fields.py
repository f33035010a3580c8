"""How a message declares its fields: where each is in a frame, and what it may hold.

    @message(10)
    class Queued(Message):
        session: HeaderSession
        epoch: HeaderEpoch
        wait_seconds: Annotated[float, Body(1, "double"), check_seconds]

Behind the type of a field stands its place in the frame, then the checks of its value. `wire/`
generates encoding and decoding from that. `docs/new-message.md` shows how a message is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NewType,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ..ids import PassId, SessionId
from .checks import Check, check_session

Scalar = Literal["uint32", "uint64", "float", "double", "bool", "string", "bytes"]
"""How protobuf writes a value."""


class Header(NamedTuple):
    """The field is this one of the frame's header."""

    name: Literal["session", "epoch", "sequence", "position", "tensor"]


class Flag(NamedTuple):
    """The field is this bit of the header's flags."""

    bit: int


class Body(NamedTuple):
    """The field has this number in the protobuf part.

    `scalar` is left out where the field is a record. `parts` are the places of the fields of a
    class that does not declare them itself. `write` and `read` convert a value that is not what
    protobuf has; `read` may raise ValueError.
    """

    number: int
    scalar: Scalar | None = None
    parts: Mapping[str, Body] | None = None
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None


class Spread(NamedTuple):
    """The field is a record whose fields stand in the protobuf part of the message itself."""

    parts: Mapping[str, Body] | None = None


Place = Header | Flag | Body | Spread


class Record:
    """A value with declared fields that is part of messages."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def check(self) -> None:
        """Raise ValueError unless the fields fit each other; each alone is checked before."""


class Message(Record):
    """What one frame says."""

    __slots__ = ()

    KIND: ClassVar[int]
    """Its number in the header; never used for another message."""

    NAME: ClassVar[str]
    """How errors call its frames."""

    COMPUTED: ClassVar[Mapping[str, Body]] = {}
    """Properties of the message that are written as fields. `read` gets them as well."""

    EMPTY_BODY: ClassVar[str] = ""
    """Complaint about a protobuf part that is there and says nothing, where that is an error."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields of a frame. May raise ValueError."""
        return cls(**fields)


_MessageType = TypeVar("_MessageType", bound=Message)


@dataclass_transform(frozen_default=True)
def message(kind: int) -> Callable[[type[_MessageType]], type[_MessageType]]:
    """Make a class the message of a kind, and a frozen dataclass."""

    def declare(declared: type[_MessageType]) -> type[_MessageType]:
        made = dataclasses.dataclass(frozen=True, slots=True)(declared)
        made.KIND = kind
        made.NAME = "".join(f"_{c}" if c.isupper() else c for c in made.__name__)[1:].upper()
        return made

    return declare


class Field(NamedTuple):
    """A declared field. `kind` is its type without None, and the elements' where it `repeats`."""

    name: str
    place: Place
    kind: type
    is_optional: bool = False
    repeats: bool = False
    checks: tuple[Check, ...] = ()

    def list_parts(self) -> tuple[Field, ...]:
        """Return the fields of the record that it holds; none if it holds no record."""
        places = None if isinstance(self.place, Header | Flag) else self.place.parts
        if places is not None:
            hints = get_type_hints(self.kind)
            return tuple(_make_field(name, (hints[name], places[name])) for name in places)
        return list_fields(self.kind) if issubclass(self.kind, Record) else ()


@cache
def list_fields(declared: type[Record]) -> tuple[Field, ...]:
    """Return the declared fields of a message or record."""
    hints = get_type_hints(declared, include_extras=True)
    made = [
        _make_field(field.name, get_args(hints[field.name]))
        for field in dataclasses.fields(declared)
    ]
    if issubclass(declared, Message):
        made += [Field(name, place, object) for name, place in declared.COMPUTED.items()]
    return tuple(made)


def _make_field(name: str, declared: tuple[Any, ...]) -> Field:
    kind, place, *checks = declared
    is_optional = get_origin(kind) in (Union, UnionType)
    if is_optional:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    repeats = get_origin(kind) is tuple
    if repeats:
        kind = get_args(kind)[0]
    while isinstance(kind, NewType):
        kind = kind.__supertype__
    return Field(name, place, kind, is_optional, repeats, tuple(checks))


def check_fields(value: Record) -> None:
    """Raise ValueError unless each field may hold what it does, and they fit each other."""
    for name, check in _list_checks(type(value)):
        field = getattr(value, name)
        if field is not None:
            check(field)
    value.check()


@cache
def _list_checks(declared: type[Record]) -> tuple[tuple[str, Check], ...]:
    """Return every check with the field that it is for; those of records in fields as well."""
    listed: list[tuple[str, Check]] = []
    for field in list_fields(declared):
        listed += [(field.name, check) for check in field.checks]
        if issubclass(field.kind, Record):
            listed.append((field.name, _check_all if field.repeats else check_fields))
    return tuple(listed)


def _check_all(values: tuple[Record, ...]) -> None:
    for value in values:
        check_fields(value)


HeaderSession = Annotated[SessionId, Header("session"), check_session]
HeaderPass = Annotated[PassId, Header("session"), check_session]
HeaderEpoch = Annotated[int, Header("epoch")]
HeaderSequence = Annotated[int, Header("sequence")]
