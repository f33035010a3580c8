"""What a client learns of the links between peers: which do not work for now, and how fast they
carry.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from .line import Line

Pair = tuple[PeerId, PeerId]
"""A peer that pushes, and the one that it pushes to."""

_FIRST_CUT_SECONDS = 30.0
_LONGEST_CUT_SECONDS = 1800.0
"""How long a link is left alone that failed between two live peers; twice as long each time."""


@dataclass
class _Link:
    line: Line = field(default_factory=Line)
    cut_until: float = float("-inf")
    cut_seconds: float = 0.0


class Links:
    """The links between peers, shared by all sessions of a client. Owned by its `Swarm`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[Pair, _Link] = {}

    def __repr__(self) -> str:
        return f"<Links: {len(self._links)} known, {len(self.cuts)} cut>"

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
        link.line.doubt()

    @contextmanager
    def carry(self, peer_ids: Sequence[PeerId], num_bytes: int) -> Iterator[float]:
        """Count bytes as under way from each peer to the next; gives the seconds that they take."""
        with ExitStack() as carrying:
            yield sum(
                carrying.enter_context(self._find(pair).line.carry(num_bytes))
                for pair in pairwise(peer_ids)
            )

    def note_answer(self, peer_ids: Sequence[PeerId], num_bytes: int, seconds: float) -> None:
        """Note that so many bytes went over all these links, one after the other, in that time."""
        for pair in pairwise(peer_ids):
            link = self._find(pair)
            link.line.note_answer(num_bytes, seconds)
            link.cut_seconds = 0.0

    def forget(self, peer_ids: Collection[PeerId]) -> None:
        """Drop what is known of peers that left long ago."""
        self._links = {
            pair: link for pair, link in self._links.items() if not set(pair) & set(peer_ids)
        }

    def _find(self, pair: Pair) -> _Link:
        return self._links.setdefault(pair, _Link())
