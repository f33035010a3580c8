"""Frames cut out of bytes, however these arrive."""

import random
import tracemalloc
from contextlib import suppress

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES
from shoal.protocol.net.frame_stream import MAX_FRAMES_AT_ONCE, Framing, Mark
from shoal.protocol.net.libp2p.libp2p_stream import MAX_GREETING_BYTES, MessageFraming, pack_message


def make_greeted() -> MessageFraming:
    framing = MessageFraming()
    assert feed(framing, pack_message(b"hello")) == [b"hello"]
    return framing


@pytest.fixture(params=["tcp", "libp2p"])
def framing(request: pytest.FixtureRequest) -> Framing:
    return Framing() if request.param == "tcp" else make_greeted()


def pack(framing: Framing, *frames: bytes) -> bytes:
    return b"".join(piece for frame in frames for piece in framing.pack(frame))


def feed(framing: Framing, data: bytes) -> list[bytes]:
    return list(framing.feed(data))


@pytest.mark.parametrize("seed", range(4))
def test_frames_come_out_whole_however_their_bytes_arrive(framing: Framing, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 3, 4, 5, 1000, MAX_PIECE_BYTES)) for _ in range(20)]
    frames = [rng.randbytes(size) for size in sizes]
    content = pack(framing, *frames) + framing.pack_mark(Mark.END)
    num_before = framing.num_ended
    received: list[bytes] = []
    while content:
        size = rng.choice((1, 2, 7, 5000, 2**20))
        received += feed(framing, content[:size])
        while framing.held_bytes:
            framing.admit()
            received += feed(framing, b"")
        content = content[size:]

    assert received == frames
    assert framing.mark is Mark.END
    assert framing.num_ended == num_before + len(frames)


@pytest.mark.parametrize("size", [MAX_PIECE_BYTES + 1, 2 * MAX_PIECE_BYTES, MAX_FRAME_BYTES])
def test_large_frame_comes_back_from_its_pieces(framing: Framing, size: int) -> None:
    frame = random.Random(size).randbytes(size)
    pieces = list(framing.pack(frame))

    received = feed(framing, b"".join(pieces) + pack(framing, b"next"))
    framing.admit()

    assert received + feed(framing, b"") == [frame, b"next"]
    assert max(map(len, pieces)) <= MAX_PIECE_BYTES + 8
    assert len(pieces) == -(-size // MAX_PIECE_BYTES)


def test_nothing_counts_behind_a_mark() -> None:
    framing = Framing()
    mark = framing.pack_mark(Mark.TOO_MANY_STREAMS)

    assert feed(framing, pack(framing, b"a") + mark + pack(framing, b"b")) == [b"a"]
    assert feed(framing, pack(framing, b"c")) == []
    assert framing.mark is Mark.TOO_MANY_STREAMS


@pytest.mark.parametrize("is_lost", [False, True], ids=["mark", "lost"])
def test_nothing_is_kept_behind_the_last_word(framing: Framing, is_lost: bool) -> None:
    with suppress(RemoteProtocolError):
        feed(framing, b"\xfc\xff\xff\xff" * 2 if is_lost else framing.pack_mark(Mark.END))
    flood = pack(framing, bytes(1000)) * 10_000
    tracemalloc.start()
    for _ in range(10):
        assert feed(framing, flood) == []
    num_kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_kept < 100_000


@pytest.mark.parametrize("is_dropping", [False, True])
def test_many_tiny_frames_are_cut_in_several_goes(framing: Framing, is_dropping: bool) -> None:
    if is_dropping:
        framing.drop_all()
    data = pack(framing, b"") * 5000 + pack(framing, b"last")
    num_at_first = framing.num_ended
    received: list[bytes] = []
    num_goes = 0
    while num_goes == 0 or framing.has_more:
        num_ended_before = framing.num_ended
        received += feed(framing, data)
        assert framing.num_ended - num_ended_before <= MAX_FRAMES_AT_ONCE
        data = b""
        num_goes += 1

    assert num_goes == -(-5001 // MAX_FRAMES_AT_ONCE)
    assert framing.num_ended == num_at_first + 5001
    assert received == ([] if is_dropping else [b""] * 5000 + [b"last"])


@pytest.mark.parametrize("keeps", [True, False])
def test_large_frame_is_held_until_it_is_admitted_or_dropped(framing: Framing, keeps: bool) -> None:
    large = random.Random(1).randbytes(MAX_PIECE_BYTES + 1)
    content = pack(framing, b"before", large, b"behind")

    assert feed(framing, content[:MAX_PIECE_BYTES]) == [b"before"]
    assert framing.held_bytes == len(large)
    assert feed(framing, content[MAX_PIECE_BYTES:]) == []

    if keeps:
        framing.admit()
    else:
        framing.drop_all()
    assert feed(framing, b"") == ([large, b"behind"] if keeps else [])
    assert framing.held_bytes == 0


def test_what_is_dropped_is_still_understood(framing: Framing) -> None:
    content = pack(framing, b"half", bytes(2 * MAX_PIECE_BYTES), b"more")
    content += framing.pack_mark(Mark.END)
    assert feed(framing, content[:6]) == []

    framing.drop_all()

    assert feed(framing, content[6:]) == []
    assert framing.mark is Mark.END


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, 2**31, min(Mark) - 1])
def test_frame_beyond_the_limit_ends_everything(framing: Framing, num_bytes: int) -> None:
    length = num_bytes.to_bytes(4, "little")
    with pytest.raises(RemoteProtocolError):
        feed(framing, length * 2 + pack(framing, b"x") * 1000)

    assert feed(framing, pack(framing, b"x")) == []
    assert framing.mark is None


def test_limit_can_be_set(framing: Framing) -> None:
    framing.max_bytes = 10
    assert feed(framing, pack(framing, bytes(10))) == [bytes(10)]
    with pytest.raises(RemoteProtocolError, match="limit"):
        feed(framing, pack(framing, bytes(11)))


LARGE = bytes(3 * MAX_PIECE_BYTES + 3)
FIRST, SECOND, *_ = Framing().pack(LARGE)


@pytest.mark.parametrize(
    "messages",
    [
        (b"\1\0\0", b"\1"),
        (b"\2\0\0\0a",),
        (b"\1\0\0\0ab",),
        (b"\xff\xff\xff\xff" + FIRST[4:],),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + FIRST[4:],),
        (FIRST[:-1],),
        (FIRST + b"x",),
        (FIRST, SECOND[:-1]),
        (FIRST, SECOND + b"x"),
    ],
)
def test_messages_of_another_size_are_the_fault_of_the_other_end(
    messages: tuple[bytes, ...],
) -> None:
    framing = make_greeted()
    framing.drop_all()  # which holds no large frame

    with pytest.raises(RemoteProtocolError):
        feed(framing, b"".join(map(pack_message, messages)))


def test_greeting_is_short() -> None:
    assert feed(MessageFraming(), pack_message(bytes(MAX_GREETING_BYTES)))
    with pytest.raises(RemoteProtocolError, match="greeting"):
        feed(MessageFraming(), pack_message(bytes(MAX_GREETING_BYTES + 1)))
