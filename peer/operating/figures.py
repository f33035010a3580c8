"""The figures of a running peer: what it serves, for how many, and how its machine is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...protocol.ids import ModelId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.gossip import GossipDirectory
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.spans import Span
from ..announcing.announcer import Announcer
from ..engine.compute_thread import ComputeCounts
from ..hosting.hosted_model import HostedModel
from ..process.background import LoopLag
from ..streams.service import JoinedPeer
from ..streams.stream_host import ServiceCounts


class OperatedLoader(Protocol):
    """The model of a peer, and what was computed of it."""

    @property
    def model(self) -> HostedModel: ...

    @property
    def counts(self) -> ComputeCounts: ...


class OperatedPeer(Protocol):
    """The parts of a peer that its owner may look into."""

    @property
    def announcer(self) -> Announcer: ...

    @property
    def joined(self) -> JoinedPeer: ...

    @property
    def loader(self) -> OperatedLoader: ...

    @property
    def directory(self) -> GossipDirectory: ...

    @property
    def lag(self) -> LoopLag: ...


@dataclass(frozen=True)
class Replicas:
    """How many peers serve the blocks of a peer, itself included."""

    least: int
    """At the block that fewest serve."""
    single: int
    """Blocks that nobody else serves."""


@dataclass(frozen=True)
class Figures:
    """A peer at one moment; the counts in `service` and `compute` go on growing."""

    peer_id: PeerId
    model_id: ModelId
    state: PeerState
    span: Span | None
    """The blocks that are served; None while there are none."""
    num_blocks: int
    """Blocks of the whole model."""
    replicas: Replicas | None
    """None while nothing is served."""
    num_announcements: int
    """Peers that are known from the directory and from others, and hold."""
    loop_lag_seconds: float
    loop_lag_max_seconds: float
    measured: Mapping[str, float]
    """What its workloads measure of themselves, see Workload.measure; nothing while it loads."""
    service: ServiceCounts
    compute: ComputeCounts


def read_figures(peer: OperatedPeer, clock: Clock) -> Figures:
    """Return the figures of this moment. Call it on the peer's event loop."""
    service, model = peer.joined.handler.service, peer.loader.model
    span = None if service is None else service.host.span
    announced = peer.directory.records.list_current(model.model_id, clock.wall())
    return Figures(
        peer_id=peer.announcer.peer_id,
        model_id=model.model_id,
        state=peer.announcer.state,
        span=span,
        num_blocks=model.spec.num_blocks,
        replicas=None if span is None else count_replicas(span, peer.announcer.peer_id, announced),
        num_announcements=len(announced),
        loop_lag_seconds=peer.lag.mean_seconds,
        loop_lag_max_seconds=peer.lag.max_seconds,
        measured={} if service is None else service.measure(),
        service=peer.joined.handler.counts,
        compute=peer.loader.counts,
    )


def count_replicas(span: Span, own_id: PeerId, announced: list[Announcement]) -> Replicas:
    """Return how many serve each block of a span, of which one is this peer.

    >>> count_replicas(Span(2, 5), PeerId("us"), [])
    Replicas(least=1, single=3)
    """
    changes = [0] * (len(span) + 1)
    for peer in announced:
        start, stop = max(peer.span.start, span.start), min(peer.span.stop, span.stop)
        if start < stop and peer.state is PeerState.ONLINE and peer.peer_id != own_id:
            changes[start - span.start] += 1
            changes[stop - span.start] -= 1
    count, counts = 1, list[int]()
    for change in changes[:-1]:
        count += change
        counts.append(count)
    return Replicas(min(counts), counts.count(1))
