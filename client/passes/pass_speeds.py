"""How fast peers take passes, as far as measured, and which of them to ask next.

Interleaved weighted round robin, after SWARM (Ryabinin et al., 2023, section 3.1): each peer gets
the next microbatch that is done there first, by what it has under way and what it took before.
"""

import math
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...protocol.ids import PeerId
from ...protocol.messages.passes import PassKind
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span
from ..routing.bandwidth import Bandwidth
from ..routing.route import Hop

_UNKNOWN_TOKENS_PER_SECOND = 500.0
"""Of a peer that neither says how fast it is nor has shown it."""

_WORK = {PassKind.FORWARD: 1.0, PassKind.BACKWARD: 3.0}
"""What a pass takes beside one forward: backward, blocks are computed twice and differentiated."""

_SMOOTHING = 0.3
_NOISE = 0.1


@dataclass(frozen=True)
class Times:
    """When a pass was asked for and answered, and how long of that its tensors were on their way.

    By the clock of this end: a peer that could say how fast it is would be asked for everything.
    """

    asked_at: float
    answered_at: float
    way_seconds: float


@dataclass
class _Speed:
    """What one peer has shown."""

    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    answered_at: float = -math.inf
    """When its newest answer came."""
    block_token_seconds: dict[PassKind, float] = field(default_factory=dict)
    """For one token through one block, and for waiting until others' passes are over."""
    network_token_seconds: float = 0.0
    """For the tensors of one token, there and back."""
    busy_seconds: float = 0.0
    """Expected of what is under way."""


class PassSpeeds:
    """What a client has measured of its peers. Owned by the client's loop."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._speeds: dict[PeerId, _Speed] = {}

    def choose(
        self, hosts: Sequence[Announcement], span: Span, num_tokens: int, kind: PassKind
    ) -> Hop:
        """Return which of the hosts of the span's first block takes it, as far as it can.

        The one that is done first, by block: a host of many blocks may take longer.
        """

        def rate(peer: Announcement) -> float:
            hop = Hop(peer, Span(span.start, min(span.stop, peer.span.stop)))
            busy_seconds = self._find(peer.peer_id).busy_seconds
            seconds = busy_seconds + self.expect_seconds(hop, num_tokens, kind)
            return seconds / len(hop.span) * self._rng.uniform(1, 1 + _NOISE)

        peer = min(hosts, key=rate)
        return Hop(peer, Span(span.start, min(span.stop, peer.span.stop)))

    def expect_seconds(self, hop: Hop, num_tokens: int, kind: PassKind) -> float:
        """Return how long a pass takes at a peer that has nothing else to do."""
        speed, peer = self._find(hop.peer.peer_id), hop.peer
        queue_seconds, block_seconds = 0.0, speed.block_token_seconds.get(kind)
        if block_seconds is None:
            announced = peer.prefill_tokens_per_second or _UNKNOWN_TOKENS_PER_SECOND
            block_seconds = _WORK[kind] / announced / len(peer.span)
            # What was measured has waited there as well.
            queue_seconds = peer.queue_seconds + peer.pass_queue_seconds
        token_seconds = block_seconds * len(hop.span) + speed.network_token_seconds
        return num_tokens * token_seconds + queue_seconds

    @contextmanager
    def counting(self, hop: Hop, num_tokens: int, kind: PassKind) -> Iterator[None]:
        """Count a pass as under way at a peer."""
        speed = self._find(hop.peer.peer_id)
        expected_seconds = self.expect_seconds(hop, num_tokens, kind)
        speed.busy_seconds += expected_seconds
        try:
            yield
        finally:
            speed.busy_seconds -= expected_seconds

    def note(self, hop: Hop, num_tokens: int, kind: PassKind, times: Times) -> None:
        """Note an answer. Its peer was at it since the last one: it takes one pass at a time."""
        speed = self._find(hop.peer.peer_id)
        seconds = times.answered_at - max(times.asked_at, speed.answered_at)
        speed.answered_at = times.answered_at
        way_seconds = min(times.way_seconds, seconds)
        shown = (seconds - way_seconds) / num_tokens / len(hop.span)
        known = speed.block_token_seconds.get(kind, shown)
        speed.block_token_seconds[kind] = known + _SMOOTHING * (shown - known)
        shown = way_seconds / num_tokens
        known = speed.network_token_seconds
        speed.network_token_seconds = known + _SMOOTHING * (shown - known)

    def find_bandwidth(self, peer_id: PeerId) -> Bandwidth:
        """Return what the line to a peer has shown."""
        return self._find(peer_id).bandwidth

    def forget_others(self, peer_ids: Collection[PeerId]) -> None:
        """Forget all peers but these."""
        self._speeds = {peer: self._speeds[peer] for peer in self._speeds.keys() & peer_ids}

    def _find(self, peer_id: PeerId) -> _Speed:
        return self._speeds.setdefault(peer_id, _Speed())
