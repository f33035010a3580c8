"""Frames cut out of bytes, however these arrive."""

import random
import tracemalloc
from contextlib import suppress

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from shoal.protocol.net.tcp.tcp_stream import (
    MAX_FRAMES_AT_ONCE,
    FrameCutter,
    Mark,
    pack_frame,
    pack_mark,
)


def pack(*frames: bytes) -> bytes:
    return b"".join(piece for frame in frames for piece in pack_frame(frame))


def feed(cutter: FrameCutter, data: bytes) -> list[bytes]:
    return list(cutter.feed(data))


@pytest.mark.parametrize("seed", range(10))
def test_frames_come_out_whole_however_their_bytes_arrive(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 3, 4, 5, 1000, MAX_PIECE_BYTES)) for _ in range(20)]
    frames = [rng.randbytes(size) for size in sizes]
    content = pack(*frames) + pack_mark(Mark.END)
    cutter = FrameCutter()
    received: list[bytes] = []
    while content:
        size = rng.choice((1, 2, 7, 5000, 2**20))
        received += feed(cutter, content[:size])
        content = content[size:]

    assert received == frames
    assert cutter.mark is Mark.END
    assert cutter.num_ended == len(frames)


def test_nothing_counts_behind_a_mark() -> None:
    cutter = FrameCutter()

    assert feed(cutter, pack(b"a") + pack_mark(Mark.TOO_MANY_STREAMS) + pack(b"b")) == [b"a"]
    assert feed(cutter, pack(b"c")) == []
    assert cutter.mark is Mark.TOO_MANY_STREAMS


@pytest.mark.parametrize("last", [pack_mark(Mark.END), b"\xfc\xff\xff\xff"], ids=["mark", "lost"])
def test_nothing_is_kept_behind_the_last_word(last: bytes) -> None:
    cutter = FrameCutter()
    with suppress(RemoteProtocolError):
        feed(cutter, last)
    flood = pack(bytes(1000)) * 10_000
    tracemalloc.start()
    for _ in range(10):
        assert feed(cutter, flood) == []
    num_kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_kept < 100_000


@pytest.mark.parametrize("is_dropping", [False, True])
def test_many_tiny_frames_are_cut_in_several_goes(is_dropping: bool) -> None:
    cutter = FrameCutter()
    if is_dropping:
        cutter.drop_all()
    data = pack(b"") * 5000 + pack(b"last")
    received: list[bytes] = []
    num_goes = 0
    while num_goes == 0 or cutter.has_more:
        num_ended_before = cutter.num_ended
        received += feed(cutter, data)
        assert cutter.num_ended - num_ended_before <= MAX_FRAMES_AT_ONCE
        data = b""
        num_goes += 1

    assert num_goes == 5
    assert cutter.num_ended == 5001
    assert received == ([] if is_dropping else [b""] * 5000 + [b"last"])


@pytest.mark.parametrize("keeps", [True, False])
def test_large_frame_is_held_until_it_is_admitted(keeps: bool) -> None:
    large = random.Random(1).randbytes(MAX_PIECE_BYTES + 1)
    cutter = FrameCutter()

    assert feed(cutter, pack(b"before", large, b"behind")[:MAX_PIECE_BYTES]) == [b"before"]
    assert cutter.held_bytes == len(large)
    assert feed(cutter, pack(b"before", large, b"behind")[MAX_PIECE_BYTES:]) == []

    cutter.admit(keeps)
    assert feed(cutter, b"") == ([large, b"behind"] if keeps else [b"behind"])
    assert cutter.held_bytes == 0
    assert cutter.num_ended == 3


def test_what_is_dropped_is_still_understood() -> None:
    cutter = FrameCutter()
    content = pack(b"half", bytes(2 * MAX_PIECE_BYTES), b"more") + pack_mark(Mark.END)
    assert feed(cutter, content[:6]) == []

    cutter.drop_all()

    assert feed(cutter, content[6:]) == []
    assert cutter.mark is Mark.END


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, 2**31, min(Mark) - 1])
def test_frame_beyond_the_limit_ends_everything(num_bytes: int) -> None:
    cutter = FrameCutter()
    with pytest.raises(RemoteProtocolError, match="limit"):
        feed(cutter, num_bytes.to_bytes(4, "little") + pack(b"x") * 1000)

    assert feed(cutter, pack(b"x")) == []
    assert cutter.mark is None


def test_limit_can_be_set() -> None:
    cutter = FrameCutter()
    cutter.max_bytes = 10
    assert feed(cutter, pack(bytes(10))) == [bytes(10)]
    with pytest.raises(RemoteProtocolError):
        feed(cutter, pack(bytes(11)))
