"""The placer: applies `placement.py` to the directory's view, at the start and while serving."""

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...protocol.errors import DirectoryError, UsageError
from ...protocol.ids import ModelId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.directory import KNOWN_PERIODS
from ...protocol.net.network import Presence
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..announcing.announcer import Announcer
from ..announcing.self_description import SelfDescription
from .placement import (
    INTENT_PERIODS,
    LOOKS_PER_PERIOD,
    MAX_INTENTS,
    Candidate,
    Intent,
    Placement,
    decide_placement,
)
from .roll_call import RollCall
from .supply import BlockRoom, Supply, list_surplus, may_count

_logger = logging.getLogger(__name__)

_UNLOADABLE = Backoff(600.0, 24 * 3600.0)
"""How long a peer keeps away from a block that it could not load: the first time as long as a peer
stays anywhere."""

_MAX_JOINING_SECONDS = 3600.0
"""A peer that has been JOINING for so long no longer counts as a future host."""


class Placed(Protocol):
    """The span of a peer, and what it measured there."""

    @property
    def span(self) -> Span: ...

    @property
    def blocks_per_second(self) -> float: ...

    @property
    def load_seconds(self) -> float:
        """Seconds that loading one block took; 0 if all were loaded already."""
        ...

    @property
    def began_at(self) -> float:
        """Seconds of the peer's clock."""
        ...


@dataclass(frozen=True)
class PlacedModel:
    """The model to place: spans of it for which there is room."""

    model_id: ModelId
    work: tuple[float, ...]
    """The cost of a step in each block."""
    room: BlockRoom

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.work)

    @property
    def has_room(self) -> bool:
        """Whether there is room for any block."""
        stops = self.room.find_stops(self.num_blocks)
        return bool((stops > range(self.num_blocks)).any())


class Placer:
    """Decides for one peer where it serves, and announces what it intends before it does it."""

    def __init__(
        self,
        model: PlacedModel,
        presence: Presence,
        announcer: Announcer,
        description: SelfDescription,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._model = model
        self._directory = presence.directory
        self._announcer = announcer
        self._description = description
        self._roll_call = RollCall(presence.transport, clock, rng)
        self._clock = clock
        self._rng = rng
        self._unloadable = Backoffs[int](_UNLOADABLE, clock)
        self._has_moved = False
        self._joining_since: dict[PeerId, float] = {}

    async def choose_first(self) -> Placement:
        """Return the span to begin with. Raises DirectoryError when nobody can be asked."""
        if not self._model.has_room:
            raise UsageError(
                "not even one block of this model fits into free memory: free some memory, give "
                "less to sessions (--kv-memory), training (--training-memory) or adapters "
                "(--adapter-memory), or set the number of blocks (--num-blocks)"
            )
        intent: Intent | None = None
        num_intents = 0
        uncounted: Collection[PeerId] = ()
        while True:
            view = await self._look()
            if intent is not None:
                uncounted = await self._call_hosts(view, Span(0, self._model.num_blocks))
            # Those behind relays cannot be dialled, and the others can be told from made-up ones.
            relayed = [peer for peer in view.peers if not peer.endpoints]
            surplus = list_surplus(
                [peer for peer in relayed if peer.peer_id != self._announcer.peer_id]
            )
            dialled = set(uncounted).difference(peer.peer_id for peer in relayed)
            supply = self._count(view, dialled.union(surplus))
            decision = self._decide(supply, None, intent)
            assert decision.span is not None
            has_choice = len(decision.span) < self._model.num_blocks and supply.rows
            is_confirmed = intent is not None and decision.span == intent.span
            if not has_choice or is_confirmed or num_intents == MAX_INTENTS:
                return decision
            intent = Intent(decision.span, supply)
            num_intents += 1
            await self._show(intent)

    def avoid(self, blocks: Collection[int]) -> None:
        """Keep away for a while from blocks that could not be loaded."""
        for block in blocks:
            self._unloadable.note_failure(block)

    async def wait_for_move(self, current: Placed) -> Placement:
        """Watch the swarm; return as soon as the peer should be somewhere else, and has said so."""
        look_seconds = self._announcer.period_seconds / LOOKS_PER_PERIOD
        await asyncio.sleep(self._rng.random() * look_seconds)
        while True:
            await asyncio.sleep(look_seconds)
            try:
                decision = await self._reconsider(current)
            except DirectoryError as error:
                _logger.warning("cannot read the directory to reconsider the placement: %s", error)
                decision = None
            if decision is not None:
                self._has_moved = True
                return decision
            await self._withdraw()

    async def _reconsider(self, current: Placed) -> Placement | None:
        """Decide, and if it is for a move say so and decide again."""
        intent: Intent | None = None
        while True:
            # What others tell is enough to find a reason, and not to act on it.
            if intent is None:
                view = await self._look(KNOWN_PERIODS * self._announcer.period_seconds)
                supply = self._count(view)
            else:
                view = await self._look()
                supply = self._count(view, await self._call_hosts(view, current.span))
            decision = self._decide(supply, current, intent)
            if decision.span in (None, current.span):
                return None
            if intent is not None and decision.span == intent.span:
                return decision
            intent = Intent(decision.span, supply)
            await self._show(intent)

    async def _withdraw(self) -> None:
        """Take back an intent, if one is out: others were faster."""
        if self._description.planned is None:
            return
        self._description.planned = None
        try:
            await self._announcer.announce(PeerState.ONLINE)
        except DirectoryError as error:
            _logger.warning("cannot withdraw the announced move of this peer: %s", error)

    async def _show(self, intent: Intent) -> None:
        """Announce an intent, and leave others the time to see it."""
        self._description.planned = intent.span
        await self._announcer.announce(PeerState.JOINING)
        await asyncio.sleep(INTENT_PERIODS * self._announcer.period_seconds)

    def _decide(self, supply: Supply, current: Placed | None, intent: Intent | None) -> Placement:
        candidate = Candidate(
            peer_id=self._announcer.peer_id,
            room=self._model.room,
            blocks_per_second=(
                supply.typical_blocks_per_second if current is None else current.blocks_per_second
            ),
            load_seconds=0.0 if current is None else current.load_seconds,
            span=None if current is None else current.span,
            residency_seconds=0.0 if current is None else self._clock.now() - current.began_at,
            has_moved=self._has_moved,
            avoided=self._unloadable.resting,
            intent=intent,
        )
        return decide_placement(supply, candidate, self._rng)

    def read_known(self) -> SwarmView:
        """Return the swarm as it is known here, without asking anybody."""
        now, records = self._clock.wall(), self._directory.records
        return self._view(records.list_current(self._model.model_id, now))

    def list_revoked(self) -> Collection[PeerId]:
        """Return the peers that the owner of the swarm has removed, as far as is known here."""
        return self._directory.records.revocations.peer_ids

    async def _look(self, max_age_seconds: float = 0.0) -> SwarmView:
        return self._view(await self._directory.lookup(self._model.model_id, max_age_seconds))

    def _view(self, announcements: Sequence[Announcement]) -> SwarmView:
        return SwarmView.from_announcements(
            self._model.model_id, announcements, self._clock.wall(), self._model.num_blocks
        )

    async def _call_hosts(self, view: SwarmView, span: Span) -> Collection[PeerId]:
        """Dial hosts of a span, which decide a move; return those that do not count for it."""
        passed_over = self._roll_call.absent | {self._announcer.peer_id}
        hosts = [peer for peer in view.peers if peer.span.overlap(span)]
        return await self._roll_call.call(
            [host for host in hosts if host.peer_id not in passed_over and may_count(host, view)],
            span,
        )

    def _count(self, view: SwarmView, uncounted: Collection[PeerId] = ()) -> Supply:
        """Return the supply without hosts that have proved to be none."""
        doubted = {*self._list_doubted(view), *self._roll_call.absent, *uncounted}
        return Supply.of_view(view, doubted, self._model.work)

    def _list_doubted(self, view: SwarmView) -> list[PeerId]:
        """Return peers that have been JOINING for too long."""
        now = self._clock.now()
        self._joining_since = {
            peer.peer_id: self._joining_since.get(peer.peer_id, now)
            for peer in view.peers
            if peer.state is PeerState.JOINING
        }
        return [
            peer_id
            for peer_id, since in self._joining_since.items()
            if now - since > _MAX_JOINING_SECONDS
        ]
