"""The pure snapshot of one model's swarm that routing, placement, monitor and simulator read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..ids import ModelId, PeerId
from ..spans import Span, find_gaps
from .announcements import Announcement, PeerState


@dataclass(frozen=True)
class SwarmView:
    """The announcements of one model at one moment. Never changes; make a new one instead.

    Peers of every state are visible; only ONLINE ones serve.
    """

    model_id: ModelId
    num_blocks: int
    """Blocks of the model; 0 when nobody has said."""
    taken_at: float
    """Wall seconds."""
    peers: tuple[Announcement, ...]
    """The newest announcement of each peer, by peer id."""

    @classmethod
    def from_announcements(
        cls,
        model_id: ModelId,
        announcements: Iterable[Announcement],
        now: float,
        num_blocks: int | None = None,
    ) -> SwarmView:
        """Return the view of one model at `now` (wall seconds).

        `announcements` are what a directory knows of that model, one of each peer. Those that have
        expired are left out. Peers that disagree about `num_blocks` are left out too: give it when
        the model's configuration is at hand, else what most peers say is taken (the least on a
        tie).
        """
        current = [peer for peer in announcements if peer.expires_at > now]
        if num_blocks is None:
            votes = Counter(peer.num_blocks for peer in current)
            num_blocks = min(votes, key=lambda count: (-votes[count], count), default=0)
        agreeing = (peer for peer in current if peer.num_blocks == num_blocks)
        return cls(model_id, num_blocks, now, tuple(sorted(agreeing, key=lambda p: p.peer_id)))

    def __repr__(self) -> str:
        states = Counter(str(peer.state) for peer in self.peers)
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        gaps = ", ".join(map(str, self.gaps)) or "none"
        return f"<SwarmView {self.num_blocks} blocks, peers: {counts or 'none'}, gaps: {gaps}>"

    @cached_property
    def online(self) -> tuple[Announcement, ...]:
        """The peers that take new sessions."""
        return tuple(peer for peer in self.peers if peer.state is PeerState.ONLINE)

    @cached_property
    def coverage(self) -> tuple[tuple[Announcement, ...], ...]:
        """For each block the ONLINE peers that serve it, by peer id."""
        return tuple(
            tuple(peer for peer in self.online if block in peer.span)
            for block in range(self.num_blocks)
        )

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The maximal spans that no ONLINE peer serves."""
        return tuple(find_gaps(self.num_blocks, (peer.span for peer in self.online)))

    @cached_property
    def _by_peer_id(self) -> dict[PeerId, Announcement]:
        return {peer.peer_id: peer for peer in self.peers}

    def serving(self, block: int) -> tuple[Announcement, ...]:
        """Return the ONLINE peers that serve a block, by peer id; none for a block not there."""
        return self.coverage[block] if 0 <= block < self.num_blocks else ()

    def find(self, peer_id: PeerId) -> Announcement | None:
        """Return what a peer announced, whatever its state."""
        return self._by_peer_id.get(peer_id)
