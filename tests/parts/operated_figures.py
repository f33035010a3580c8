"""What a peer that loads its blocks knows of itself, for tests of its metrics."""

from announcements import MODEL, identity_of

from shoal.peer.engine.compute_thread import ComputeCounts
from shoal.peer.operating.figures import Figures
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.records.announcements import PeerState


def make_figures() -> Figures:
    """Return the figures of such a peer."""
    return Figures(
        peer_id=identity_of(1).peer_id,
        model_id=MODEL,
        state=PeerState.JOINING,
        span=None,
        num_blocks=8,
        replicas=None,
        num_announcements=0,
        loop_lag_seconds=0.25,
        loop_lag_max_seconds=0.5,
        measured={},
        service=ServiceCounts(),
        compute=ComputeCounts(),
    )
