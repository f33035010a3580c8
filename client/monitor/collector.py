"""All that the monitor does on the network: it reads the directory of a swarm, and dials peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from ...protocol.errors import DirectoryError
from ...protocol.ids import ModelId
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.net.gossip import GossipDirectory
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.tasks import cancel_all
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from .state import (
    PERIODS_PER_LIFETIME,
    Change,
    Dialled,
    SwarmState,
    Visibility,
    WatchedPeer,
    reduce_dialling,
    reduce_failure,
    reduce_reading,
)

MAX_MODELS = 32
"""Models that are watched; anybody may announce one."""

READ_SECONDS = 5.0
"""How often what is known is looked at. The directory is searched once in each announcement
period, and peers tell what is new in between: a search asks up to 16 nodes."""

_USUAL_PERIOD_SECONDS = 30.0
_DIAL_SECONDS = 10.0
_LOOK_SECONDS = 30.0
"""How long a single look dials peers."""

_JOINS = Backoff(2.0, 60.0)
"""Between attempts to join: a monitor may start before its swarm."""

_LIST_READINGS = 6
"""In one of so many readings new models are looked for."""

_MODELS_AT_ONCE = 4
_DIALS_AT_ONCE = 16
_REDIAL_SECONDS = 60.0
"""How old the round-trip time to a peer may become: while there are not too many peers."""

_DIALS_PER_SECOND = 2.0
"""Of peers that are on time; those that are late are dialled at once."""


@dataclass(frozen=True)
class SwarmAccess:
    """The network and the clock, as a monitor uses them; `access.py` makes the one that ships."""

    clock: Clock
    join: Callable[[Sequence[str]], Awaitable[tuple[Transport, Directory]]]
    """Join through these addresses as a client; raises DirectoryError where nobody answers."""
    dial: Callable[[Announcement, Transport], Awaitable[Dialled]]
    """Talk to a peer; raises nothing."""


class Collector:
    """Brings the state of one swarm up to date and hands out each change. Owned by one program."""

    def __init__(
        self,
        access: SwarmAccess,
        take: Callable[[Change], None],
        read_seconds: float = READ_SECONDS,
    ) -> None:
        """`take` gets each new state with what has happened."""
        self._read_seconds = read_seconds
        self._access = access
        self._take_change = take
        self.state = SwarmState()
        self._swarm: tuple[Transport, Directory] | None = None
        self._directories: dict[ModelId, GossipDirectory] = {}
        self._gossiping: dict[ModelId, asyncio.Task[None]] = {}
        self._num_readings = 0
        self._turns = asyncio.Semaphore(_MODELS_AT_ONCE)

    async def join(self, addresses: Sequence[str]) -> None:
        """Join the swarm as a client; raises DirectoryError where nobody answers."""
        self._swarm = await self._access.join(addresses)

    async def run(self, addresses: Sequence[str]) -> None:
        """Join, which may take until somebody answers; then read and dial until cancelled."""
        attempts = Retry(_JOINS, self._access.clock)
        while self._swarm is None:
            try:
                await self.join(addresses)
            except DirectoryError as error:
                self._apply(reduce_failure(self.state, str(error)))
                attempts.note_failure()
                await attempts.pause()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_reading())
            tasks.create_task(self._keep_dialling())

    @property
    def _joined(self) -> tuple[Transport, Directory]:
        assert self._swarm is not None, "the swarm has to be joined first"
        return self._swarm

    async def read(self) -> None:
        """Read the peers of every model once, and note in the state which models nobody tells."""
        if self._num_readings % _LIST_READINGS == 0 or not self._directories:
            try:
                self._add_models(await self._joined[1].list_models())
            except DirectoryError as error:
                if not self._directories:
                    self._apply(reduce_failure(self.state, str(error)))
                    return
        self._num_readings += 1
        await asyncio.gather(*map(self._read_model, list(self._directories)))
        models = self.state.models.values()
        if models and all(model.error for model in models):
            self._apply(reduce_failure(self.state, next(iter(models)).error))
        elif not models:
            self._apply((SwarmState(read_at=self._access.clock.wall()), ()))

    async def dial_all(self) -> None:
        """Dial every peer that is announced, once: who does not answer is lost.

        Those for which there is no time stay as they are announced.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._dial(self._list_dialled(), must_answer=True)

    async def close(self) -> None:
        """Leave the swarm."""
        for model_id in list(self._directories):
            await self._forget(model_id)
        if self._swarm is not None:
            transport, directory = self._swarm
            try:
                await transport.close()
            finally:
                await directory.close()

    def _add_models(self, model_ids: list[ModelId]) -> None:
        new = [model_id for model_id in model_ids if model_id not in self._directories]
        num_free = MAX_MODELS - len(self._directories)
        for model_id in random.sample(new, min(len(new), num_free)):
            self._directories[model_id] = GossipDirectory(
                self._joined[1],
                model_id,
                self._joined[0],
                self._access.clock,
                random.Random(),
                may_ask=lambda peer: True,
            )

    async def _forget(self, model_id: ModelId) -> None:
        if (gossiping := self._gossiping.pop(model_id, None)) is not None:
            await cancel_all([gossiping])
        await self._directories.pop(model_id).stop()

    async def _read_model(self, model_id: ModelId) -> None:
        async with self._turns:
            try:
                announced = await self._directories[model_id].lookup(
                    model_id, self._find_period(model_id)
                )
            except DirectoryError as error:
                self._apply(reduce_failure(self.state, str(error), model_id))
                return
        now = self._access.clock.wall()
        self._apply(reduce_reading(self.state, model_id, announced, now))
        if model_id not in self.state.models:
            await self._forget(model_id)

    def _find_period(self, model_id: ModelId) -> float:
        """Return how often peers of a model announce themselves, in seconds."""
        model = self.state.models.get(model_id)
        lifetimes = [
            peer.announcement.expires_at - peer.announcement.issued_at
            for peer in (model.peers.values() if model else ())
        ]
        return median(lifetimes) / PERIODS_PER_LIFETIME if lifetimes else _USUAL_PERIOD_SECONDS

    async def _keep_reading(self) -> None:
        while True:
            await self.read()
            for model_id, directory in self._directories.items():
                if model_id not in self._gossiping:
                    gossiping = asyncio.create_task(directory.run(READ_SECONDS))
                    self._gossiping[model_id] = gossiping
            await asyncio.sleep(self._read_seconds)

    async def _keep_dialling(self) -> None:
        """Dial those that are late at once, and all others in turn."""
        while True:
            late, others = list[WatchedPeer](), list[WatchedPeer]()
            now = self._access.clock.wall()
            for peer in self._list_dialled():
                age = float("inf") if peer.dialled is None else now - peer.dialled.at
                if peer.visibility is Visibility.NOT_SEEN and age > READ_SECONDS:
                    late.append(peer)
                elif age > _REDIAL_SECONDS:
                    others.append(peer)
            others.sort(key=lambda peer: 0.0 if peer.dialled is None else peer.dialled.at)
            await self._dial([*late, *others][:_DIALS_AT_ONCE])
            num_dialled = min(len(late) + len(others), _DIALS_AT_ONCE)
            await asyncio.sleep(max(1.0, num_dialled / _DIALS_PER_SECOND))

    def _list_dialled(self) -> list[WatchedPeer]:
        return [
            peer
            for model in self.state.models.values()
            for peer in model.peers.values()
            if peer.visibility in (Visibility.SEEN, Visibility.NOT_SEEN)
        ]

    async def _dial(self, peers: list[WatchedPeer], must_answer: bool = False) -> None:
        turns = asyncio.Semaphore(_DIALS_AT_ONCE)

        async def dial(peer: WatchedPeer) -> None:
            async with turns:
                announced = peer.announcement
                try:
                    async with asyncio.timeout(_DIAL_SECONDS):
                        dialled = await self._access.dial(announced, self._joined[0])
                except TimeoutError:
                    fault = f"silent: it did not answer within {_DIAL_SECONDS:g} s"
                    dialled = Dialled(self._access.clock.wall(), fault)
                ids = announced.model_id, announced.peer_id
                self._apply(reduce_dialling(self.state, *ids, dialled, must_answer))

        await asyncio.gather(*map(dial, peers))

    def _apply(self, change: Change) -> None:
        self.state = change[0]
        self._take_change(change)


async def look_once(access: SwarmAccess, addresses: Sequence[str]) -> SwarmState:
    """Return the state of a swarm as it is now, of peers that answer."""
    collector = Collector(access, lambda change: None)
    try:
        await collector.join(addresses)
        await collector.read()
        await collector.dial_all()
    except DirectoryError as error:
        return reduce_failure(collector.state, str(error))[0]
    finally:
        await collector.close()
    return collector.state
