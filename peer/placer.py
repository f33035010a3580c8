"""Where a peer serves, decided again and again: `placement.py` over what the directory shows."""

import asyncio
import logging
import random
from collections.abc import Collection
from dataclasses import dataclass

from ..protocol.errors import DirectoryError, UsageError
from ..protocol.ids import ModelId, PeerId
from ..protocol.net.clock import Clock
from ..protocol.net.directory import Directory
from ..protocol.records.announcements import PeerState
from ..protocol.records.swarm_view import SwarmView
from .announcing.announcer import Announcer
from .announcing.self_description import SelfDescription
from .hosting.hosting import Stay
from .placement.placement import (
    INTENT_PERIODS,
    LOOKS_PER_PERIOD,
    MAX_INTENTS,
    Action,
    Candidate,
    Decision,
    Intent,
    decide_placement,
)
from .placement.room import Room
from .placement.setbacks import Setbacks
from .placement.supply import Supply

_logger = logging.getLogger(__name__)

_MAX_JOINING_SECONDS = 3600.0
"""Who says for so long that he is about to serve is no longer believed: others may be needed."""


@dataclass(frozen=True)
class PlacedModel:
    """What is to be placed: spans of one model for which there is room."""

    model_id: ModelId
    work: tuple[float, ...]
    """What a step costs in each block."""
    room: Room

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
        peer_id: PeerId,
        model: PlacedModel,
        directory: Directory,
        announcer: Announcer,
        description: SelfDescription,
        clock: Clock,
    ) -> None:
        self._peer_id = peer_id
        self._model = model
        self._directory = directory
        self._announcer = announcer
        self._description = description
        self._clock = clock
        self._rng = random.Random()
        self._setbacks = Setbacks()
        self._has_moved = False
        self._joining_since: dict[PeerId, float] = {}

    async def choose_first(self) -> Decision:
        """Return the span to begin with. Raises DirectoryError when nobody can be asked."""
        if not self._model.has_room:
            raise UsageError(
                "not even one block of this model fits into free memory: free some memory, give "
                "less to sessions (--kv-memory), training (--training-memory) or adapters "
                "(--adapter-memory), or set the number of blocks (--num-blocks)"
            )
        intent: Intent | None = None
        num_intents = 0
        while True:
            supply = await self._take_supply()
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
        self._setbacks.note(blocks, self._clock.now())

    async def wait_for_move(self, stay: Stay) -> Decision:
        """Watch the swarm; return as soon as the peer should be somewhere else, and has said so."""
        look_seconds = self._announcer.period_seconds / LOOKS_PER_PERIOD
        await asyncio.sleep(self._rng.random() * look_seconds)
        while True:
            await asyncio.sleep(look_seconds)
            try:
                decision = await self._reconsider(stay)
            except DirectoryError as error:
                _logger.warning("cannot look where the peer is needed: %s", error)
                decision = None
            if decision is not None:
                self._has_moved = True
                return decision
            await self._withdraw()

    async def _reconsider(self, stay: Stay) -> Decision | None:
        """Decide, and if it is for a move say so and decide again."""
        intent: Intent | None = None
        while True:
            supply = await self._take_supply()
            decision = self._decide(supply, stay, intent)
            if decision.action is Action.STAY or decision.span is None:
                return None
            if intent is not None and decision.span == intent.span:
                return decision
            intent = Intent(decision.span, supply)
            await self._show(intent)

    async def _withdraw(self) -> None:
        """Take back an intent, if one is out: others were faster."""
        if self._description.planned is None:
            return
        self._description.plan(None)
        try:
            await self._announcer.announce(PeerState.ONLINE)
        except DirectoryError as error:
            _logger.warning("cannot announce that the peer stays: %s", error)

    async def _show(self, intent: Intent) -> None:
        """Announce an intent, and leave others the time to see it."""
        self._description.plan(intent.span)
        await self._announcer.announce(PeerState.JOINING)
        await asyncio.sleep(INTENT_PERIODS * self._announcer.period_seconds)

    def _decide(self, supply: Supply, stay: Stay | None, intent: Intent | None) -> Decision:
        candidate = Candidate(
            peer_id=self._peer_id,
            room=self._model.room,
            blocks_per_second=(
                supply.typical_blocks_per_second if stay is None else stay.blocks_per_second
            ),
            load_seconds=0.0 if stay is None else stay.load_seconds,
            span=None if stay is None else stay.engine.span,
            residency_seconds=0.0 if stay is None else self._clock.now() - stay.began_at,
            has_moved=self._has_moved,
            avoided=self._setbacks.list_avoided(self._clock.now()),
            intent=intent,
        )
        return decide_placement(supply, candidate, self._rng)

    async def _take_supply(self) -> Supply:
        announcements = await self._directory.lookup(self._model.model_id)
        view = SwarmView.from_announcements(
            self._model.model_id, announcements, self._clock.wall(), self._model.num_blocks
        )
        return Supply.of_view(view, self._list_doubted(view), self._model.work)

    def _list_doubted(self, view: SwarmView) -> list[PeerId]:
        """Return who has been about to serve something for too long."""
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
