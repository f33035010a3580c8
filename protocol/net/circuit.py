"""What is said to a relay to get a place, in the words of libp2p's circuit relay v2.

See https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. The messages are of protobuf.
"""

from ..errors import RemoteProtocolError

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"

RESERVE = bytes([2, 0x08, 0])
"""Its length, and a HopMessage of which field 1, the type, is 0."""

OK = 100
_STATUS_FIELD = 5


def read_status(message: bytes) -> int:
    """Return the status in the answer of a relay, a message of protobuf; 0 where it has none.

    >>> read_status(bytes([0x08, 2, 0x1A, 2, 0x08, 1, 0x28, 100]))
    100
    """
    status = position = 0
    try:
        while position < len(message):
            tag, position = _read_varint(message, position)
            value, position = _read_varint(message, position)
            if tag & 7 == 2:
                position += value
            elif tag & 7 != 0:
                raise RemoteProtocolError("the answer of the relay has unknown fields")
            elif tag >> 3 == _STATUS_FIELD:
                status = value
    except IndexError:
        raise RemoteProtocolError("the answer of the relay is cut short") from None
    return status


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number in seven bits a byte, and where the next one begins; raises IndexError."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
