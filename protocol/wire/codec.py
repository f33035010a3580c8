"""Messages to frames and back, generated from the declared fields of every message."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from ..errors import LocalProtocolError, RemoteProtocolError
from ..messages import adapters, offers, passes, session
from ..messages.fields import Body, Flag, Header, Message, Spread, check_fields, list_fields
from .bodies import BodyCodec
from .frames import Kind, Parts, join_frame, split_frame


def encode_frame(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises LocalProtocolError when the other end would not accept them.
    """
    try:
        check_fields(message)
        return join_frame(CODECS[message.KIND].encode(message))
    except (ValueError, struct.error) as error:
        name = type(message).__name__
        raise LocalProtocolError(f"this {name} cannot be sent: {error}") from error


def decode_frame(frame: bytes) -> Message:
    """Return the message of a frame. Tensor bytes are a view into the frame, not a copy.

    Raises RemoteProtocolError, and nothing else, for whatever a stranger may have sent.
    """
    parts = split_frame(frame, _KINDS, _FLAGS)
    codec = CODECS[parts.kind]
    for name, empty in codec.unused:
        if getattr(parts, name) != empty:
            raise RemoteProtocolError(f"a {codec.kind.name} frame has no {name}")
    try:
        message = codec.decode(parts)
        check_fields(message)
    except ValueError as error:
        raise RemoteProtocolError(f"damaged {codec.kind.name} frame: {error}") from None
    return message


class Codec:
    """Both ways of one message: which field of the frame holds what."""

    def __init__(self, message: type[Message]) -> None:
        self.message = message
        self._header: list[tuple[str, str, type[IntEnum] | None]] = []
        self._flags: list[tuple[str, int]] = []
        has_body = False
        for field in list_fields(message):
            match field.place:
                case Header(name):
                    kind = field.kind if issubclass(field.kind, IntEnum) else None
                    self._header.append((name, field.name, kind))
                case Flag(bit):
                    self._flags.append((field.name, bit))
                case Body() | Spread():
                    has_body = True
        self.body = BodyCodec(message) if has_body else None
        used = {name for name, _, _ in self._header}
        self.kind = Kind(message.KIND, message.NAME, "tensor" in used)
        if self._flags:
            used.add("flags")
        if self.body:
            used.add("control")
        self.unused = [
            (name, empty)
            for name, empty in Parts._field_defaults.items()
            if name not in used and name != "tensor"
        ]
        self.flags = [bit for _, bit in self._flags]

    def encode(self, message: Message) -> Parts:
        """Return the fields of the frame."""
        values: dict[str, Any] = {}
        for name, attribute, _ in self._header:
            value = getattr(message, attribute)
            if value is not None:
                values[name] = value
        flags = 0
        for attribute, bit in self._flags:
            if getattr(message, attribute):
                flags |= bit
        control = b"" if self.body is None else self.body.write(message)
        return Parts(self.kind.number, flags=flags, control=control, **values)

    def decode(self, parts: Parts) -> Message:
        """Return the message that a stranger wrote, not yet checked. May raise ValueError."""
        values: dict[str, Any] = {}
        for name, attribute, kind in self._header:
            value = getattr(parts, name)
            values[attribute] = value if kind is None else kind(value)
        for attribute, bit in self._flags:
            values[attribute] = bool(parts.flags & bit)
        if self.body is not None:
            said = self.body.read(bytes(parts.control))
            if parts.control and self.message.EMPTY_BODY and not any(said.values()):
                raise ValueError(self.message.EMPTY_BODY)
            values.update(said)
        return self.message.read(values)


def _list_messages() -> Iterator[type[Message]]:
    """Yield every message that a module of a conversation declares."""
    for module in (session, passes, adapters, offers):
        for value in vars(module).values():
            is_message = isinstance(value, type) and issubclass(value, Message)
            if is_message and value.__module__ == module.__name__:
                yield value


def _make_codecs() -> dict[int, Codec]:
    codecs: dict[int, Codec] = {}
    for message in _list_messages():
        codec = codecs.setdefault(message.KIND, Codec(message))
        if codec.message is not message:
            raise TypeError(f"{message.NAME} and {codec.kind.name} are of one kind")
    return codecs


CODECS = _make_codecs()
"""Both ways of every message, by its kind."""

_KINDS = {number: codec.kind for number, codec in CODECS.items()}
_FLAGS = sum({bit for codec in CODECS.values() for bit in codec.flags})
