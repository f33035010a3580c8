"""Frames: one fixed header, a protobuf part, raw tensor bytes.

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
from collections.abc import Mapping
from typing import NamedTuple

from .. import limits
from ..errors import RemoteProtocolError
from ..ids import NO_SESSION
from ..tensors import WireDtype, WireTensor, check_tensor

FRAME_VERSION = 1
_RAW_CODEC = 1
"""How the elements of a tensor are laid out: there is one way so far."""

_MAGIC = b"sh"
_HEADER = struct.Struct("<2sBBHBB16sIQIIIIII")
HEADER_BYTES = _HEADER.size


class Kind(NamedTuple):
    """What the frames of one kind of message are like."""

    number: int
    name: str
    has_tensor: bool


class Parts(NamedTuple):
    """The fields of a frame; `control` is protobuf, `tensor` a whole tensor or None."""

    kind: int
    session: bytes = NO_SESSION
    epoch: int = 0
    sequence: int = 0
    position: int = 0
    flags: int = 0
    control: bytes | memoryview = b""
    tensor: WireTensor | None = None


def join_frame(parts: Parts) -> bytes:
    """Return the bytes of a frame. Raises ValueError and struct.error for what fits into none."""
    tensor = parts.tensor
    codes, shape, data = (0, 0), (0, 0, 0), b""
    if tensor is not None:
        codes, shape, data = (tensor.dtype, _RAW_CODEC), tensor.shape, memoryview(tensor.data)
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


def split_frame(frame: bytes, kinds: Mapping[int, Kind], known_flags: int) -> Parts:
    """Return the fields of a frame; its tensor is a view into the frame, not a copy.

    Raises RemoteProtocolError, and nothing else, for whatever a stranger may have sent.
    """
    if not HEADER_BYTES <= len(frame) <= limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes is outside the allowed sizes")
    (magic, version, number, flags, dtype, codec, session, epoch, sequence, position,
     rows, tokens, width, control_length, tensor_length) = _HEADER.unpack_from(frame)  # fmt: skip
    if magic != _MAGIC:
        raise RemoteProtocolError("the frame does not begin like one of shoal's")
    if version != FRAME_VERSION:
        raise RemoteProtocolError(f"frame version {version} is not {FRAME_VERSION}")
    if flags & ~known_flags:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if control_length > limits.MAX_CONTROL_BYTES:
        raise RemoteProtocolError(f"a control part of {control_length} bytes is too large")
    if HEADER_BYTES + control_length + tensor_length != len(frame):
        raise RemoteProtocolError(
            f"the header speaks of {control_length} + {tensor_length} bytes, "
            f"{len(frame) - HEADER_BYTES} follow"
        )
    kind = kinds.get(number)
    if kind is None:
        raise RemoteProtocolError(f"unknown frame kind {number}")
    view = memoryview(frame)[HEADER_BYTES:]
    tensor = None
    if kind.has_tensor:
        tensor = read_tensor(dtype, codec, (rows, tokens, width), view[control_length:])
    elif tensor_length or rows or tokens or width or dtype or codec:
        raise RemoteProtocolError(f"a {kind.name} frame carries no tensor")
    control = view[:control_length]
    return Parts(number, session, epoch, sequence, position, flags, control, tensor)


def read_tensor(
    dtype: int, codec: int, shape: tuple[int, int, int], data: memoryview
) -> WireTensor:
    """Check codes, shape and length against each other and return the tensor, without a copy.

    Raises RemoteProtocolError: the other end wrote these numbers.

    >>> read_tensor(1, 1, (1, 1, 2), memoryview(bytes(8))).shape
    (1, 1, 2)
    """
    try:
        tensor = WireTensor(WireDtype(dtype), *shape, data)
        if codec != _RAW_CODEC:
            raise ValueError(f"{codec} is not a valid WireCodec")
        check_tensor(tensor)
    except ValueError as error:
        raise RemoteProtocolError(f"malformed tensor: {error}") from None
    return tensor
