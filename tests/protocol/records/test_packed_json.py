"""Texts of announcements in fewer bytes, and what strangers may send in their place."""

from __future__ import annotations

import contextlib
import random
import zlib

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.records import announcements
from shoal.protocol.records.announcements import pack, unpack

LIMIT = 1000


@pytest.mark.parametrize("text", [b"", b"{}", b'{"state":"online"}' * 50, bytes(range(256)) * 3])
def test_text_survives(text: bytes) -> None:
    assert unpack(pack(text), LIMIT) == text


def test_dictionary_is_that_of_the_announcements_out_there() -> None:
    """Another one is another format, and needs another version byte in front of announcements."""
    assert zlib.adler32(announcements._DICTIONARY) == 0xB5981C2E


def test_text_that_is_too_long_is_not_unpacked() -> None:
    assert unpack(pack(bytes(LIMIT)), LIMIT) == bytes(LIMIT)
    bomb = pack(bytes(10_000_000))

    assert len(bomb) < 20_000
    with pytest.raises(RemoteProtocolError, match="longer than 1000"):
        unpack(bomb, LIMIT)


def test_every_cut_and_every_tail_is_refused() -> None:
    packed = pack(b'{"state":"online","weights":"int8","peer_id":"Qm"}')

    for length in range(len(packed)):
        with pytest.raises(RemoteProtocolError):
            unpack(packed[:length], LIMIT)
    with pytest.raises(RemoteProtocolError):
        unpack(packed + b"x", LIMIT)


def test_random_bytes_end_in_nothing_but_a_protocol_error() -> None:
    rng = random.Random(1)

    for _ in range(200):
        with contextlib.suppress(RemoteProtocolError):
            assert len(unpack(rng.randbytes(60), LIMIT)) <= LIMIT


def test_other_formats_of_the_same_method_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(zlib.compress(b'{"state":"online"}'), LIMIT)
