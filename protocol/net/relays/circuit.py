"""What is said to a relay to get a place, in the words of libp2p's circuit relay v2.

See https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. The messages are of protobuf.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ...errors import RemoteProtocolError

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"

RESERVE = bytes([2, 0x08, 0])
"""Its length, and a HopMessage of which field 1, the type, is 0."""

OK = 100
_LIMIT_FIELD = 4
_STATUS_FIELD = 5
_MAX_SECONDS_FIELD = 1
_MAX_BYTES_FIELD = 2


class RelayAnswer(NamedTuple):
    """What a relay says to who asks for a place, and how much one connection through it may carry
    until it is cut; 0 where it does not say, which means that nothing cuts it.
    """

    status: int
    max_seconds: int
    max_bytes: int


def read_answer(message: bytes) -> RelayAnswer:
    """Read the answer of a relay, a message of protobuf.

    >>> read_answer(bytes([0x08, 2, 0x1A, 2, 0x08, 1, 0x22, 4, 0x08, 120, 0x10, 99, 0x28, 100]))
    RelayAnswer(status=100, max_seconds=120, max_bytes=99)
    """
    fields = dict(_read_fields(message))
    status, limit = fields.get(_STATUS_FIELD, 0), fields.get(_LIMIT_FIELD, b"")
    if not isinstance(status, int) or not isinstance(limit, bytes):
        raise RemoteProtocolError("the answer of the relay has fields of other types")
    limits = dict(_read_fields(limit))
    seconds, num_bytes = limits.get(_MAX_SECONDS_FIELD, 0), limits.get(_MAX_BYTES_FIELD, 0)
    if not isinstance(seconds, int) or not isinstance(num_bytes, int):
        raise RemoteProtocolError("the limit of the relay has fields of other types")
    return RelayAnswer(status, seconds, num_bytes)


def _read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field; raises RemoteProtocolError where it makes no sense."""
    position = 0
    try:
        while position < len(message):
            tag, position = _read_varint(message, position)
            value, position = _read_varint(message, position)
            if tag & 7 == 2:
                position += value
                yield tag >> 3, message[position - value : position]
            elif tag & 7 == 0:
                yield tag >> 3, value
            else:
                raise RemoteProtocolError("the answer of the relay has unknown fields")
    except IndexError:
        raise RemoteProtocolError("the answer of the relay is cut short") from None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number in seven bits a byte, and where the next one begins; raises IndexError."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
