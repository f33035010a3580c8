"""How a message declares its fields: where each is in a frame, and what it may hold.

    @message(10)
    class Queued(Message):
        session: HeaderSession
        epoch: HeaderEpoch
        wait_seconds: Annotated[float, Body(1, "double"), check_seconds]

Behind the type of a field stands its location in the frame, then the checks of its value. `wire/`
generates encoding and decoding from that. `docs/new-message.md` shows how a message is added.
"""

from __future__ import annotations

import dataclasses
import math
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

from .. import limits
from ..ids import (
    ADAPTER_ID_BYTES,
    MODEL_ID_CHARACTERS,
    NO_SESSION,
    SESSION_ID_BYTES,
    PassId,
    SessionId,
)
from ..spans import Span

Check = Callable[[Any], None]
"""Raises ValueError unless a field may have the value; `wire/` says whose fault it is."""

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

    `scalar` is left out where the field is a record. `parts` are the locations of the fields of a
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


Location = Header | Flag | Body | Spread


class Record:
    """A value with declared fields that is part of messages."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def check(self) -> None:
        """Raise ValueError unless the fields fit each other; each alone is checked before."""


class Message(Record):
    """One message: the typed content of a frame."""

    __slots__ = ()

    KIND: ClassVar[int]
    """Its number in the header; never used for another message."""

    NAME: ClassVar[str]
    """How errors call its frames."""

    COMPUTED: ClassVar[Mapping[str, Body]] = {}
    """Properties of the message that are written as fields. `read` gets them as well."""

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
    location: Location
    kind: type
    is_optional: bool = False
    repeats: bool = False
    checks: tuple[Check, ...] = ()

    def list_parts(self) -> tuple[Field, ...]:
        """Return the fields of the record that it holds; none if it holds no record."""
        locations = None if isinstance(self.location, Header | Flag) else self.location.parts
        if locations is not None:
            hints = get_type_hints(self.kind)
            return tuple(_make_field(name, (hints[name], locations[name])) for name in locations)
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
        made += [Field(name, location, object) for name, location in declared.COMPUTED.items()]
    return tuple(made)


def _make_field(name: str, declared: tuple[Any, ...]) -> Field:
    kind, location, *checks = declared
    is_optional = get_origin(kind) in (Union, UnionType)
    if is_optional:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    repeats = get_origin(kind) is tuple
    if repeats:
        kind = get_args(kind)[0]
    while isinstance(kind, NewType):
        kind = kind.__supertype__
    return Field(name, location, kind, is_optional, repeats, tuple(checks))


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


_MAX_SECONDS = 1e12


def check_session(value: bytes) -> None:
    """Raise ValueError unless this can be the id of a session, a pass or an upload."""
    if len(value) != SESSION_ID_BYTES or value == NO_SESSION:
        raise ValueError("the session id is missing or malformed")


def check_model_id(value: str) -> None:
    """Raise ValueError unless this can be the id of a model."""
    if len(value) != MODEL_ID_CHARACTERS or not value.isalnum() or not value.isascii():
        raise ValueError("malformed model id")


def check_span(value: Span) -> None:
    """Raise ValueError for a span beyond the blocks that a model can have."""
    if value.stop > limits.MAX_BLOCKS:
        raise ValueError(f"block {value.stop} is beyond {limits.MAX_BLOCKS}")


def check_position(value: int) -> None:
    """Raise ValueError unless a session can be this long."""
    if not 0 <= value <= limits.MAX_SESSION_TOKENS:
        raise ValueError(f"position {value} is beyond {limits.MAX_SESSION_TOKENS}")


def check_count(value: float, bound: int, name: str) -> None:
    """Raise ValueError unless a number is from 1 to a bound."""
    if not 0 < value <= bound:
        raise ValueError(f"{name} {value} is outside 1..{bound}")


def check_number(value: float, lowest: float, highest: float, name: str) -> None:
    """Raise ValueError unless a number is finite and within bounds, which are allowed as well."""
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest:g} to {highest:g}")


def check_seconds(value: float) -> None:
    """Raise ValueError unless this can be a duration."""
    if not 0 <= value <= _MAX_SECONDS:  # NaN is neither
        raise ValueError(f"{value} is not a duration")


def check_text(value: str) -> None:
    """Raise ValueError for a text that is long, or that could steer the terminal it is shown on.

    >>> check_text("the peer is about to leave")
    >>> check_text("\x1b[2J")
    Traceback (most recent call last):
    ...
    ValueError: a text has characters that cannot be printed
    """
    if len(value) > limits.MAX_TEXT_CHARACTERS:
        raise ValueError(f"a text of {len(value)} characters is too long")
    if not value.isprintable():
        raise ValueError("a text has characters that cannot be printed")


def clean_text(value: str) -> str:
    """Return a text as `check_text` accepts it: cut, and without what cannot be printed.

    >>> clean_text("two\\nlines")
    'two lines'
    """
    cut = value[: limits.MAX_TEXT_CHARACTERS]
    return "".join(character if character.isprintable() else " " for character in cut)


def count_to(bound: int, name: str) -> Check:
    """Return a check for a number from 1 to a bound."""
    return lambda value: check_count(value, bound, name)


def index_below(bound: int) -> Check:
    """Return a check for an index below a bound."""
    return lambda value: check_count(value + 1, bound, "offset")


def number_in(lowest: float, highest: float, name: str) -> Check:
    """Return a check for a finite number within bounds, which are allowed as well."""
    return lambda value: check_number(value, lowest, highest, name)


def sized(num_bytes: int, name: str) -> Check:
    """Return a check for bytes of a fixed length."""

    def check(value: bytes) -> None:
        if len(value) != num_bytes:
            raise ValueError(f"{name} has {num_bytes} bytes, not {len(value)}")

    return check


def sized_or_none(num_bytes: int, name: str) -> Check:
    """Return a check for bytes of a fixed length, or none."""
    check = sized(num_bytes, name)
    return lambda value: check(value) if value else None


check_adapter = sized_or_none(ADAPTER_ID_BYTES, "an adapter's digest")
"""Raise ValueError unless this can be the digest of an adapter, or of none."""


HeaderSession = Annotated[SessionId, Header("session"), check_session]
HeaderPass = Annotated[PassId, Header("session"), check_session]
HeaderEpoch = Annotated[int, Header("epoch")]
HeaderSequence = Annotated[int, Header("sequence")]
