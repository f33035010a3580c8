"""How fast lines are, as far as answers tell, and which links between peers do not work for now."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock

_UNKNOWN_BYTES_PER_SECOND = 256 * 2**10
"""A line of two megabits per second, until a large step was answered."""

_LEAST_BYTES_PER_SECOND = 16 * 2**10
_LARGE_BYTES = 64 * 2**10
"""Answers to smaller steps tell of round trips and computing only."""


class Bandwidth:
    """How fast one line is: that of a client, shared by all of its steps, or one between two peers.

    The transport buffers what is sent, so that only an answer says when a step had arrived: an
    answer to so many bytes in so many seconds means that the line is at least so fast.
    """

    def __init__(self) -> None:
        self._shown_bytes_per_second: deque[float] = deque(maxlen=16)
        self._guessed_bytes_per_second: float = _UNKNOWN_BYTES_PER_SECOND
        self._num_bytes = 0

    @contextmanager
    def carry(self, num_bytes: int) -> Iterator[float]:
        """Count bytes as under way; gives the seconds until they and all others have arrived."""
        self._num_bytes += num_bytes
        try:
            yield self.expect_seconds(self._num_bytes)
        finally:
            self._num_bytes -= num_bytes

    @property
    def num_bytes(self) -> int:
        """How many bytes are under way."""
        return self._num_bytes

    def expect_seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes take at most, as far as the line has shown."""
        known = self._shown_bytes_per_second
        return num_bytes / max(known, default=self._guessed_bytes_per_second)

    def note_answer(self, num_bytes: int, seconds: float) -> None:
        """Note that so many bytes, there and back, were carried in at most so many seconds."""
        if num_bytes >= _LARGE_BYTES and seconds > 0:
            self._shown_bytes_per_second.append(num_bytes / seconds)

    def note_silence(self, num_bytes: int) -> None:
        """Note that no answer came: as long as nothing else is known, the line may be slow."""
        if num_bytes >= _LARGE_BYTES:
            self.doubt()

    def doubt(self) -> None:
        """Take the line for slower than before, as long as nothing else is known."""
        halved = self._guessed_bytes_per_second / 2
        self._guessed_bytes_per_second = max(halved, _LEAST_BYTES_PER_SECOND)


Pair = tuple[PeerId, PeerId]
"""A peer that pushes, and the one that it pushes to."""

_FIRST_CUT_SECONDS = 30.0
_LONGEST_CUT_SECONDS = 1800.0
"""How long a link is left alone that failed between two live peers; twice as long each time."""


@dataclass
class _Link:
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    cut_until: float = float("-inf")
    cut_seconds: float = 0.0


class PeerLinks:
    """The links between peers, shared by all sessions of a client. Part of its `PeerBook`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[Pair, _Link] = {}

    def __repr__(self) -> str:
        return f"<PeerLinks: {len(self._links)} known, {len(self.cuts)} cut>"

    @property
    def cuts(self) -> frozenset[Pair]:
        """Those that are not to be used now."""
        now = self._clock.now()
        return frozenset(pair for pair, link in self._links.items() if now < link.cut_until)

    def is_cut(self, before: PeerId, after: PeerId) -> bool:
        """Return whether a link is left alone for now."""
        link = self._links.get((before, after))
        return link is not None and self._clock.now() < link.cut_until

    def note_cut(self, before: PeerId, after: PeerId) -> None:
        """Leave a link alone for a while: it failed, and both of its ends live.

        It may have been too slow for what it had to carry; the next time it gets longer for that.
        Many sessions may tell of one failure; it counts once.
        """
        link = self._find((before, after))
        if self.is_cut(before, after):
            return
        link.cut_seconds = min(max(2 * link.cut_seconds, _FIRST_CUT_SECONDS), _LONGEST_CUT_SECONDS)
        link.cut_until = self._clock.now() + link.cut_seconds
        link.bandwidth.doubt()

    @contextmanager
    def carry(self, peer_ids: Sequence[PeerId], num_bytes: int) -> Iterator[float]:
        """Count bytes as under way from each peer to the next; gives the seconds that they take."""
        with ExitStack() as carrying:
            yield sum(
                carrying.enter_context(self._find(pair).bandwidth.carry(num_bytes))
                for pair in pairwise(peer_ids)
            )

    def note_answer(self, peer_ids: Sequence[PeerId], num_bytes: int, seconds: float) -> None:
        """Note that so many bytes went over all these links, one after the other, in that time."""
        for pair in pairwise(peer_ids):
            link = self._find(pair)
            link.bandwidth.note_answer(num_bytes, seconds)
            link.cut_seconds = 0.0

    def forget(self, peer_ids: Collection[PeerId]) -> None:
        """Drop what is known of peers that left long ago."""
        self._links = {
            pair: link for pair, link in self._links.items() if not set(pair) & set(peer_ids)
        }

    def _find(self, pair: Pair) -> _Link:
        return self._links.setdefault(pair, _Link())
