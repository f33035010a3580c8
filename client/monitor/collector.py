"""All that the monitor does on the network: it reads the directory of a swarm, and probes peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
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
    Change,
    ProbeResult,
    SwarmState,
    Visibility,
    WatchedPeer,
    reduce_failure,
    reduce_forgetting,
    reduce_probe,
    reduce_reading,
)

MAX_MODELS = 32
"""Models that are watched; anybody may announce one."""

READ_SECONDS = 5.0
"""How often what is known is looked at. Peers tell what is new in between."""

_TOLD_PERIODS = 1.5
"""How old announcements of peers may be, in periods of theirs, on the median: they are renewed
after one, and need some time from peer to peer."""

_SEARCH_PERIODS = 20
"""After so many the directory is searched while peers tell what is new. They search it twice as
often, and tell what they find. A search costs as much as what 300 peers announce in 27 seconds."""

_THERE = Visibility.SEEN, Visibility.NOT_SEEN
_USUAL_PERIOD_SECONDS = 30.0
_PROBE_SECONDS = 10.0
_LOOK_SECONDS = 30.0
"""How long a single look probes peers."""

_JOINS = Backoff(2.0, 60.0)
"""Between attempts to join: a monitor may start before its swarm."""

_LIST_READINGS = 24
"""In one of so many readings new models are looked for: every two minutes, since each time costs as
much traffic as half a period's announcements of 300 peers."""

_MODELS_AT_ONCE = 4
_PROBES_AT_ONCE = 16
_PROBE_AGAIN_SECONDS = 60.0
"""How old the round-trip time to a peer may become: while there are not too many peers."""

_PROBES_PER_SECOND = 2.0
"""Of peers that are known; others are probed as soon as may be."""

_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class SwarmAccess:
    """The network and the clock, as a monitor uses them; `access.py` makes the one that ships."""

    clock: Clock
    join: Callable[[Sequence[str]], Awaitable[tuple[Transport, Directory]]]
    """Join through these addresses as a client; raises DirectoryError where nobody answers."""
    probe: Callable[[Announcement, Transport], Awaitable[ProbeResult]]
    """Dial a peer and greet it; raises nothing."""


class Collector:
    """Brings the state of one swarm up to date and hands out each change. Owned by one program."""

    def __init__(
        self,
        access: SwarmAccess,
        take: Callable[[Change], None],
        read_seconds: float = READ_SECONDS,
        only: Iterable[ModelId] = (),
    ) -> None:
        """`take` gets each new state with what has happened. Watches `only` some models, or all."""
        self._only = list(only)
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
        """Join, which may take until somebody answers; then read and probe until cancelled."""
        attempts = Retry(_JOINS, self._access.clock)
        while self._swarm is None:
            try:
                await self.join(addresses)
            except DirectoryError as error:
                self._apply(reduce_failure(self.state, str(error)))
                attempts.note_failure()
                await attempts.pause()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_reading(tasks))
            tasks.create_task(self._keep_probing_late())
            tasks.create_task(self._keep_probing())

    @property
    def _joined(self) -> tuple[Transport, Directory]:
        assert self._swarm is not None, "the swarm has to be joined first"
        return self._swarm

    async def read(self) -> None:
        """Read the peers of every model once, and note in the state which models nobody tells."""
        if self._num_readings % _LIST_READINGS == 0 or not self._directories:
            try:
                await self._add_models(self._only or await self._joined[1].list_models())
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

    async def probe_all(self) -> None:
        """Probe every peer that is announced, once, in any order, while there is time."""
        peers = self._list_there()
        random.shuffle(peers)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._probe(peers)

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

    async def _add_models(self, model_ids: Sequence[ModelId]) -> None:
        """Watch other models as well, where there is no room instead of some that are empty."""
        new = [model_id for model_id in model_ids if model_id not in self._directories]
        num_lacking = len(self._directories) + len(new) - MAX_MODELS
        for model_id in self._list_empty()[: max(0, num_lacking)]:
            await self._forget(model_id)
            self._apply(reduce_forgetting(self.state, model_id))
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

    def _list_empty(self) -> list[ModelId]:
        """Return the models none of whose peers answers, those with the fewest first."""
        known = [self.state.models[one] for one in self._directories if one in self.state.models]
        empty = [model for model in known if not (model.has_answered or model.pending)]
        return [model.model_id for model in sorted(empty, key=lambda model: len(model.peers))]

    async def _forget(self, model_id: ModelId) -> None:
        if (gossiping := self._gossiping.pop(model_id, None)) is not None:
            await cancel_all([gossiping])
        await self._directories.pop(model_id).stop()

    async def _read_model(self, model_id: ModelId) -> None:
        async with self._turns:
            try:
                announced = await self._directories[model_id].lookup(
                    model_id, self._choose_search_age(model_id)
                )
            except DirectoryError as error:
                self._apply(reduce_failure(self.state, str(error), model_id))
                return
        now = self._access.clock.wall()
        self._apply(reduce_reading(self.state, model_id, announced, now))
        if model_id not in self.state.models:
            await self._forget(model_id)

    def _choose_search_age(self, model_id: ModelId) -> float:
        """Return after how many seconds the directory is searched for a model again.

        A search asks up to 16 nodes. While peers tell in time what most others announce, it is
        seldom needed; else once in a period.
        """
        model, now = self.state.models.get(model_id), self._access.clock.wall()
        if model is None or not model.peers:
            return _USUAL_PERIOD_SECONDS
        peers = model.peers.values()
        period_seconds = median(peer.period_seconds for peer in peers)
        ages = [
            (now - peer.announcement.issued_at) / peer.period_seconds
            for peer in peers
            if peer.visibility in _THERE
        ]
        are_told = bool(ages) and median(ages) < _TOLD_PERIODS
        return period_seconds * (_SEARCH_PERIODS if are_told else 1)

    async def _keep_reading(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self.read()
            for model_id, directory in self._directories.items():
                if model_id not in self._gossiping:
                    gossiping = tasks.create_task(directory.run(READ_SECONDS))
                    self._gossiping[model_id] = gossiping
            await asyncio.sleep(self._read_seconds)

    async def _keep_probing_late(self) -> None:
        """Probe those at once that may be gone, or that are elsewhere; known ones first."""
        while True:
            now = self._access.clock.wall()
            late = [
                peer
                for peer in self._list_there()
                if peer.probe is not None and now - peer.probe.at > READ_SECONDS
                if peer.visibility is Visibility.NOT_SEEN
                or (peer.is_confirmed and (peer.probe.is_absent or peer.since > peer.probe.at))
            ]
            late.sort(key=lambda peer: not peer.is_confirmed)
            await self._probe(late[:_PROBES_AT_ONCE])
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _keep_probing(self) -> None:
        """Probe the others: new ones soon, known ones now and then."""
        while True:
            now = self._access.clock.wall()
            probed = [(peer.probe, peer) for peer in self._list_there() if peer.probe is not None]
            probed = [one for one in probed if now - one[0].at > _PROBE_AGAIN_SECONDS]
            probed.sort(key=lambda one: one[0].at)
            new = [peer for peer in self._list_there() if peer.probe is None]
            random.shuffle(new)  # however many a stranger makes up, others have their turn
            turns = chain.from_iterable(zip_longest(new, (peer for _, peer in probed)))
            chosen = list(islice(filter(None, turns), _PROBES_AT_ONCE))
            await self._probe(chosen)
            pause_seconds = 0.0 if new else len(chosen) / _PROBES_PER_SECOND
            await asyncio.sleep(max(_PAUSE_SECONDS, pause_seconds))

    def _list_there(self) -> list[WatchedPeer]:
        return [
            peer
            for model in self.state.models.values()
            for peer in model.peers.values()
            if peer.visibility in _THERE
        ]

    async def _probe(self, peers: list[WatchedPeer]) -> None:
        turns = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def probe(peer: WatchedPeer) -> None:
            async with turns:
                announced = peer.announcement
                try:
                    async with asyncio.timeout(_PROBE_SECONDS):
                        result = await self._access.probe(announced, self._joined[0])
                except TimeoutError:
                    fault = f"silent: it did not answer within {_PROBE_SECONDS:g} s"
                    result = ProbeResult(self._access.clock.wall(), fault)
                ids = announced.model_id, announced.peer_id
                self._apply(reduce_probe(self.state, *ids, result))

        await asyncio.gather(*map(probe, peers))

    def _apply(self, change: Change) -> None:
        self.state = change[0]
        self._take_change(change)


async def look_once(
    access: SwarmAccess, addresses: Sequence[str], only: Iterable[ModelId] = ()
) -> SwarmState:
    """Return the state of a swarm as it is now, of peers that answer."""
    collector = Collector(access, lambda change: None, only=only)
    try:
        await collector.join(addresses)
        await collector.read()
        await collector.probe_all()
    except DirectoryError as error:
        return reduce_failure(collector.state, str(error))[0]
    finally:
        await collector.close()
    return collector.state
