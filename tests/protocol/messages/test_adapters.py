"""The pieces of an adapter: honest ones come together, anything else is refused."""

from dataclasses import replace

import pytest
from wire_messages import HEAD

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.messages.adapters import (
    SLOWEST_BYTES_PER_SECOND,
    STALL_SECONDS,
    AdapterReader,
    UploadPace,
    allow_upload_seconds,
    cut_adapter,
)
from shoal.protocol.messages.codec import decode_frame, encode_frame

PIECE_BYTES = 48 * 2**10
DATA = bytes(range(256)) * 400


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES, PIECE_BYTES + 1, 100_000])
def test_adapter_comes_together_again(num_bytes: int) -> None:
    pieces = list(cut_adapter(HEAD.upload_id, DATA[:num_bytes]))
    reader = AdapterReader(replace(HEAD, num_bytes=num_bytes))
    for piece in pieces:
        assert not reader.is_complete
        assert decode_frame(encode_frame(piece)) == piece
        reader.take(piece)

    assert reader.is_complete
    assert reader.join() == DATA[:num_bytes]


@pytest.mark.parametrize(
    "changes", [{"offset": 1}, {"data": b"x"}, {"data": bytes(PIECE_BYTES + 1)}], ids="-".join
)
def test_piece_that_is_not_the_next_one_is_refused(changes: dict) -> None:
    reader = AdapterReader(replace(HEAD, num_bytes=len(DATA)))
    first, second, *_ = cut_adapter(HEAD.upload_id, DATA)

    with pytest.raises(RemoteProtocolError, match="the next one has 49152 at 0"):
        reader.take(replace(first, **changes))
    with pytest.raises(RemoteProtocolError, match="the next one has 49152 at 0"):
        reader.take(second)


def test_nothing_follows_a_whole_adapter() -> None:
    reader = AdapterReader(replace(HEAD, num_bytes=5))
    (piece,) = cut_adapter(HEAD.upload_id, DATA[:5])
    reader.take(piece)

    with pytest.raises(RemoteProtocolError):
        reader.take(replace(piece, offset=5))


def test_adapter_may_come_for_as_long_as_it_is_not_too_slow() -> None:
    pace, now = UploadPace(5.0), 5.0
    assert pace.deadline == 5.0 + STALL_SECONDS
    for _ in range(1000):
        now += 1.0
        pace.note_piece(SLOWEST_BYTES_PER_SECOND, now)
    assert pace.deadline == now + STALL_SECONDS


def test_adapter_that_drips_comes_too_late() -> None:
    pace, now, num_bytes = UploadPace(0.0), 0.0, 0
    while now < pace.deadline:
        now += 1.0
        pace.note_piece(SLOWEST_BYTES_PER_SECOND // 4, now)
        num_bytes += SLOWEST_BYTES_PER_SECOND // 4
    assert now == pytest.approx(allow_upload_seconds(num_bytes), abs=1.0)
    assert now < 2 * STALL_SECONDS


def test_adapter_that_came_fast_may_not_stand_still_for_longer() -> None:
    pace = UploadPace(0.0)
    pace.note_piece(2**26, 1.0)
    assert pace.deadline == 1.0 + STALL_SECONDS
