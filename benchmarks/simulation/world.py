"""A discrete-event simulation of peers that place themselves.

Peers announce, look and move as a real peer does: each decision is that of
`peer/placement/placement.py`, over the announcements that a directory would show at that moment.
Time is a number; nothing waits.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from shoal.peer.announcing.announcer import LIFETIME_PERIODS
from shoal.peer.placement.placement import (
    INTENT_PERIODS,
    LOOKS_PER_PERIOD,
    MAX_INTENTS,
    Candidate,
    Intent,
    decide_placement,
)
from shoal.peer.placement.roll_call import choose_hosts
from shoal.peer.placement.supply import BlockRoom, Supply, may_count
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.ids import MODEL_ID_CHARACTERS, ModelId, PeerId
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span
from shoal.protocol.versions import CHAIN_VERSION
from simulation.machines import Churn, ChurnEvent, Machine

MODEL_ID = ModelId("0" * MODEL_ID_CHARACTERS)

_ENDPOINT = Endpoint("simulated", 1)


@dataclass(frozen=True)
class WorldConfig:
    """How a simulated swarm works."""

    num_blocks: int = 80
    period_seconds: float = 30.0
    """Between two announcements of a peer."""
    propagation_seconds: float = 1.0
    """Until everybody can read an announcement."""
    view_seconds: float = 2.0
    """How old the view is at most that a peer decides on."""
    drain_seconds: float = 10.0
    """What a move costs before loading begins: sessions are handed over."""


@dataclass(frozen=True)
class Move:
    """A peer that left a span for another one."""

    seconds: float
    """When it began."""
    peer_id: PeerId
    origin: Span
    target: Span


class SimulatedPeer:
    """A peer in the simulation, and what has become of it."""

    def __init__(self, peer_id: PeerId, machine: Machine) -> None:
        self.peer_id = peer_id
        self.machine = machine
        self.state = PeerState.JOINING
        self.span: Span | None = None
        """What it serves, if it is ONLINE."""
        self.online_since = 0.0
        self.has_moved = False
        self.intent: Intent | None = None
        self.num_intents = 0
        """How often it said where it intends to be, without being there."""
        self.is_alive = True
        self.sequence = 0

    def make_candidate(self, now: float) -> Candidate:
        """Return what the peer knows of itself."""
        return Candidate(
            peer_id=self.peer_id,
            room=BlockRoom(self.machine.max_blocks),
            blocks_per_second=self.machine.blocks_per_second,
            load_seconds=self.machine.load_seconds,
            span=self.span,
            residency_seconds=now - self.online_since,
            has_moved=self.has_moved,
            intent=self.intent,
        )


class World:
    """All peers, what they announced, and what is to happen next."""

    def __init__(self, config: WorldConfig, rng: random.Random) -> None:
        self.config = config
        self.now = 0.0
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.moves: list[Move] = []
        """Those that were begun."""
        self.num_withdrawn = 0
        self.num_dials: list[tuple[float, int]] = []
        """How many hosts were dialled before a move, and when."""
        self.on_change: Callable[[SimulatedPeer, bool], None] = lambda peer, serves: None
        """Called when a peer begins or ends to serve its span."""
        self._rng = rng
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._directory: dict[PeerId, Announcement] = {}
        self._on_their_way: list[tuple[float, int, Announcement]] = []
        self._seen: tuple[float, SwarmView, Supply] | None = None

    def schedule(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action))

    def follow(self, trace: Iterable[ChurnEvent], draw: Callable[[str], Machine]) -> None:
        """Let peers come and go as a trace says; `draw` makes the machine of a name."""
        for event in trace:
            self.schedule(event.seconds - self.now, lambda event=event: self._happen(event, draw))

    def run_until(self, end_seconds: float) -> None:
        """Let everything happen up to a moment."""
        while self._events and self._events[0][0] <= end_seconds:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end_seconds

    def add(self, name: str, machine: Machine, span: Span | None = None) -> SimulatedPeer:
        """Let a peer join; with a span it serves that at once."""
        peer = SimulatedPeer(PeerId(name), machine)
        self.peers[peer.peer_id] = peer
        period_seconds = self.config.period_seconds
        if span is None:
            self._look(peer)
        else:
            self._begin_serving(peer, span)
        # Where a peer is in its period is nobody else's business.
        self.schedule(self._rng.uniform(0, 1) * period_seconds, lambda: self._renew(peer))
        look_seconds = period_seconds / LOOKS_PER_PERIOD
        self.schedule(self._rng.uniform(0, 1) * look_seconds, lambda: self._look_again(peer))
        return peer

    def remove(self, peer: SimulatedPeer, says_goodbye: bool) -> None:
        """Let a peer be gone."""
        if peer.span is not None and peer.state is PeerState.ONLINE:
            self.on_change(peer, False)
        if says_goodbye:
            self._announce(peer, PeerState.OFFLINE)
        peer.is_alive = False
        del self.peers[peer.peer_id]

    def take_view(self) -> SwarmView:
        """Return what everybody can read now."""
        while self._on_their_way and self._on_their_way[0][0] <= self.now:
            _, _, announcement = heapq.heappop(self._on_their_way)
            self._directory[announcement.peer_id] = announcement
        view = SwarmView.from_announcements(
            MODEL_ID, self._directory.values(), self.now, self.config.num_blocks
        )
        self._directory = {peer.peer_id: peer for peer in view.peers}
        return view

    def _take_supply(self) -> Supply:
        """Return the supply by a view that is fresh enough."""
        if self._seen is None or self.now - self._seen[0] > self.config.view_seconds:
            view = self.take_view()
            self._seen = self.now, view, Supply.of_view(view)
        return self._seen[2]

    def _happen(self, event: ChurnEvent, draw: Callable[[str], Machine]) -> None:
        if event.kind is Churn.JOIN:
            self.add(event.name, draw(event.name))
        elif (peer := self.peers.get(PeerId(event.name))) is not None:
            self.remove(peer, says_goodbye=event.kind is Churn.LEAVE)

    def _renew(self, peer: SimulatedPeer) -> None:
        if peer.is_alive:
            self._announce(peer, peer.state)
            self.schedule(self.config.period_seconds, lambda: self._renew(peer))

    def _look_again(self, peer: SimulatedPeer) -> None:
        if not peer.is_alive:
            return
        if peer.state is PeerState.ONLINE:
            self._look(peer)
        look_seconds = self.config.period_seconds / LOOKS_PER_PERIOD
        self.schedule(look_seconds, lambda: self._look_again(peer))

    def _look(self, peer: SimulatedPeer) -> None:
        """Decide, and announce the intent if there is one."""
        supply = self._take_supply()
        decision = decide_placement(supply, peer.make_candidate(self.now), self._rng)
        if decision.span is not None and decision.span != peer.span:
            self._intend(peer, Intent(decision.span, supply))

    def _intend(self, peer: SimulatedPeer, intent: Intent, is_final: bool = False) -> None:
        """Announce an intent; look again whether it holds, unless it is final."""
        if peer.state is PeerState.ONLINE:
            self.on_change(peer, False)
        peer.intent = intent
        peer.num_intents += 1
        self._announce(peer, PeerState.JOINING)
        if is_final:
            self._begin_loading(peer, intent.span)
            return
        wait_seconds = INTENT_PERIODS * self.config.period_seconds
        self.schedule(wait_seconds, lambda: self._confirm(peer))

    def _confirm(self, peer: SimulatedPeer) -> None:
        """Carry an intent out, unless others were faster."""
        if not peer.is_alive or peer.intent is None:
            return
        supply = self._call_hosts(peer, self._take_supply())
        decision = decide_placement(supply, peer.make_candidate(self.now), self._rng)
        if decision.span == peer.intent.span:
            self._begin_loading(peer, peer.intent.span)
        elif peer.span is not None and decision.span == peer.span:
            self.num_withdrawn += 1
            self._serve(peer)
        else:
            assert decision.span is not None
            is_last = peer.num_intents == MAX_INTENTS
            self._intend(peer, Intent(decision.span, supply), is_last)

    def _call_hosts(self, peer: SimulatedPeer, supply: Supply) -> Supply:
        """Dial hosts as a roll call does; return the supply without those that are gone."""
        assert self._seen is not None
        view = self._seen[1]
        span = peer.span or Span(0, self.config.num_blocks)
        hosts = [
            host
            for host in view.peers
            if host.peer_id != peer.peer_id and may_count(host, view) and host.span.overlap(span)
        ]
        random.Random(peer.peer_id).shuffle(hosts)
        called = {host.peer_id for host in choose_hosts(hosts, span)}
        self.num_dials.append((self.now, len(called)))
        gone = {peer_id for peer_id in called if peer_id not in self.peers}
        if not gone:
            return supply
        return Supply.of_view(view, {host.peer_id for host in hosts} - called | gone)

    def _begin_loading(self, peer: SimulatedPeer, span: Span) -> None:
        kept = None if peer.span is None else peer.span.overlap(span)
        seconds = (len(span) - (len(kept) if kept else 0)) * peer.machine.load_seconds
        if peer.span is not None:
            seconds += self.config.drain_seconds
            peer.has_moved = True
            self.moves.append(Move(self.now, peer.peer_id, peer.span, span))
        self.schedule(seconds, lambda: self._begin_serving(peer, span))

    def _begin_serving(self, peer: SimulatedPeer, span: Span) -> None:
        if peer.is_alive:
            peer.span, peer.online_since = span, self.now
            self._serve(peer)

    def _serve(self, peer: SimulatedPeer) -> None:
        peer.intent, peer.num_intents = None, 0
        self._announce(peer, PeerState.ONLINE)
        self.on_change(peer, True)

    def _announce(self, peer: SimulatedPeer, state: PeerState) -> None:
        """Publish what a peer says of itself; with an intent, where it is going to be."""
        peer.state = state
        span = peer.intent.span if peer.intent is not None else peer.span
        if span is None:
            return
        peer.sequence += 1
        announcement = make_announcement(
            peer.peer_id,
            peer.machine,
            span,
            state,
            num_blocks=self.config.num_blocks,
            sequence=peer.sequence,
            issued_at=self.now,
            expires_at=self.now + LIFETIME_PERIODS * self.config.period_seconds,
        )
        visible_at = self.now + self.config.propagation_seconds
        heapq.heappush(self._on_their_way, (visible_at, next(self._numbers), announcement))


def make_announcement(
    peer_id: PeerId, machine: Machine, span: Span, state: PeerState, **facts: Any
) -> Announcement:
    """Return what a simulated peer says of itself; `facts` are the other fields."""
    return Announcement(
        peer_id=peer_id,
        model_id=MODEL_ID,
        span=span,
        state=state,
        endpoints=(_ENDPOINT,),
        min_version=1,
        max_version=CHAIN_VERSION,
        weights="int8",
        compute_dtype="bf16",
        decode_steps_per_second=machine.boast * machine.blocks_per_second / len(span),
        **facts,
    )
