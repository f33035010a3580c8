"""Whatever the bytes: a message that could have been sent, or the typed error."""

import random
import struct
from collections.abc import Callable

import pytest
from wire_messages import (
    BODIES,
    OFFSETS,
    ONE_OF_EACH,
    check_is_canonical,
    decode_or_refuse,
    patch,
    with_control,
)

from shoal.protocol import limits
from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.messages.codec import HEADER_BYTES, decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Hello


def flip(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(rng: random.Random, frame: bytes) -> bytes:
    names = rng.sample(sorted(set(OFFSETS) - {"magic", "session"}), rng.randint(1, 3))
    changed = frame
    for name in names:
        bits = 8 * struct.calcsize(OFFSETS[name][1])
        value = rng.choice((0, 1, 2, 3, 255, 2**bits - 1, 2 ** (bits - 1), rng.getrandbits(bits)))
        changed = patch(changed, **{name: value % 2**bits})
    return changed


def cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def extend(rng: random.Random, frame: bytes) -> bytes:
    return frame + rng.randbytes(rng.randint(1, 64))


def splice(rng: random.Random, frame: bytes) -> bytes:
    other = encode_frame(rng.choice(list(ONE_OF_EACH.values())))
    return frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :]


def scramble_control(rng: random.Random, frame: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", frame, OFFSETS["control_length"][0])
    noise = rng.randbytes(rng.randrange(24))
    return patch(frame[:HEADER_BYTES] + noise + frame[HEADER_BYTES + length :],
                 control_length=len(noise))  # fmt: skip


@pytest.mark.parametrize("mutate", [flip, overwrite, cut, extend, splice, scramble_control])
def test_mutated_frame_decodes_or_is_refused(
    mutate: Callable[[random.Random, bytes], bytes],
) -> None:
    for kind, honest in ONE_OF_EACH.items():
        rng = random.Random(f"{kind.__name__} {mutate.__name__}")
        frame = encode_frame(honest)

        for _ in range(300):
            message = decode_or_refuse(mutate(rng, frame))
            if message is not None:
                check_is_canonical(message)


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_are_refused(seed: int) -> None:
    rng = random.Random(seed)

    for _ in range(500):
        noise = rng.randbytes(rng.randrange(200))
        assert decode_or_refuse(noise) is None
        message = decode_or_refuse(b"sh\x01" + bytes([rng.randint(1, 9)]) + noise)
        if message is not None:
            check_is_canonical(message)


def test_bytes_beyond_the_declared_lengths_are_refused() -> None:
    for message in ONE_OF_EACH.values():
        assert decode_or_refuse(encode_frame(message) + b"x") is None, message


def test_control_part_has_a_limit() -> None:
    def decode_with_padding(num_bytes: int) -> Message:
        """Decode a Hello whose control part is one unknown field of so many bytes."""
        padding = b"\x7a" + BODIES[Hello](software="x" * (num_bytes - 4)).SerializeToString()[1:]
        assert len(padding) == num_bytes
        return decode_frame(with_control(ONE_OF_EACH[Hello], padding))

    assert decode_with_padding(limits.MAX_CONTROL_BYTES - 4) == Hello(0, 0, "")
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_with_padding(limits.MAX_CONTROL_BYTES + 4)


def test_every_prefix_of_a_frame_is_refused() -> None:
    for message in ONE_OF_EACH.values():
        frame = encode_frame(message)
        for stop in range(len(frame)):
            assert decode_or_refuse(frame[:stop]) is None, f"{stop} bytes of {message}"
