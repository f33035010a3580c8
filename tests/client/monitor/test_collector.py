"""What the monitor reads and dials, in a directory in memory that may be silent."""

from __future__ import annotations

import asyncio

from announcements import MODEL, NOW, identity_of, make_announcement, sign
from hand_clock import HandClock

from shoal.client.monitor.collector import MAX_MODELS, Collector, SwarmAccess, look_once
from shoal.client.monitor.state import Health, ProbeResult
from shoal.protocol.errors import DirectoryError
from shoal.protocol.ids import ModelId
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

OTHER = ModelId("b" * 32)


class Swarm(MemoryDirectory):
    """A directory that tells no peers of `silent` models, and how often it was asked."""

    def __init__(self) -> None:
        self.clock = HandClock(NOW)
        super().__init__(MemoryDirectoryStore(), self.clock)
        self.silent: set[ModelId] = set()
        self.num_searches = 0
        self.dialled: list[str] = []
        self.dead: set[str] = set()

    @property
    def access(self) -> SwarmAccess:
        return SwarmAccess(self.clock, self._join, self._probe)

    async def _join(self, addresses: object) -> tuple[Transport, Directory]:
        return LoopbackTransport(LoopbackNetwork(0), "monitor"), self

    async def _probe(self, peer: Announcement, transport: object) -> ProbeResult:
        self.dialled.append(peer.peer_id)
        fault = "closed port" if peer.peer_id in self.dead else ""
        return ProbeResult(self.clock.wall(), fault)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self.num_searches += 1
        if model_id in self.silent:
            raise DirectoryError("nobody answers")
        return await super().lookup(model_id)

    def list_told(self) -> list[bytes]:
        """Return what its peers know of each other."""
        return [one.value for one in self._store.records.list_records(MODEL, self.clock.wall())]

    async def tell(self, number: int, span: Span, model_id: ModelId = MODEL) -> None:
        """Have a peer of another process announce itself."""
        now = self.clock.wall()
        announcement = make_announcement(
            number, now, span=span, model_id=model_id, sequence=int(now)
        )
        theirs = MemoryDirectory(self._store, self.clock)
        await theirs.announce(sign(announcement, number))


async def test_silent_model_is_unknown_beside_one_that_is_whole() -> None:
    swarm = Swarm()
    for number in (1, 2):
        await swarm.tell(number, Span(0, 8))
    await swarm.tell(3, Span(0, 8), OTHER)
    swarm.silent = {OTHER}

    state = await look_once(swarm.access, [])

    assert state.models[MODEL].health is Health.HEALTHY
    assert (state.models[OTHER].health, state.models[OTHER].error) == (
        Health.UNKNOWN,
        "nobody answers",
    )
    assert state.health is Health.UNKNOWN


async def test_single_look_counts_those_that_answer() -> None:
    swarm = Swarm()
    for number in (1, 2):
        await swarm.tell(number, Span(0, 8))
    swarm.dead = {identity_of(2).peer_id}

    state = await look_once(swarm.access, [])

    assert sorted(swarm.dialled) == sorted(identity_of(number).peer_id for number in (1, 2))
    assert (state.health, state.models[MODEL].depths) == (Health.DEGRADED, (1,) * 8)
    assert not state.models[MODEL].peers[identity_of(2).peer_id].is_confirmed


async def test_models_that_nobody_serves_make_room_for_others() -> None:
    swarm = Swarm()
    await swarm.tell(1, Span(0, 8))
    collector = Collector(swarm.access, lambda change: None)
    await collector.join([])
    await collector.read()
    await collector.probe_all()
    fakes = [ModelId(f"{number:032x}") for number in range(1, 3 * MAX_MODELS)]
    for number, model_id in enumerate(fakes, 2):
        await swarm.tell(number, Span(0, 8), model_id)
        swarm.dead.add(identity_of(number).peer_id)
    seen = set[ModelId]()

    for _ in range(3):
        swarm.clock.seconds += 1.0
        for _ in range(24):
            await collector.read()
        assert len(collector.state.models) == MAX_MODELS
        assert MODEL in collector.state.models
        seen |= collector.state.models.keys()
        await collector.probe_all()

    assert len(seen) > MAX_MODELS
    assert collector.state.health is Health.DEGRADED  # that of the one that is served
    await collector.close()


async def test_only_models_that_are_asked_for_are_watched() -> None:
    swarm = Swarm()
    await swarm.tell(1, Span(0, 8))
    await swarm.tell(2, Span(0, 4), OTHER)

    state = await look_once(swarm.access, [], only=[MODEL])

    assert (list(state.models), state.health) == ([MODEL], Health.DEGRADED)
    empty = await look_once(Swarm().access, [], only=[MODEL])
    assert (empty.models, empty.health) == ({}, Health.FAILING)


async def test_directory_is_searched_once_in_a_period_while_peers_tell_nothing() -> None:
    swarm = Swarm()
    collector = Collector(swarm.access, lambda change: None)
    await collector.join([])
    searches = list[int]()

    for _ in range(10):
        await swarm.tell(1, Span(0, 8))
        await swarm.tell(2, Span(0, 8))
        for _ in range(6):
            await collector.read()
            swarm.clock.seconds += 5.0
        searches.append(swarm.num_searches)

    # A search brings what was announced up to a period before, so every second one finds it fresh.
    assert searches[0] == 1
    assert 5 <= swarm.num_searches <= 10
    assert collector.state.models[MODEL].peers.keys() == {
        identity_of(number).peer_id for number in (1, 2)
    }
    await collector.close()


async def test_directory_is_searched_seldom_while_peers_tell_of_each_other() -> None:
    swarm = Swarm()
    collector = Collector(swarm.access, lambda change: None)
    await collector.join([])
    searches = list[int]()

    for _ in range(22):
        await swarm.tell(1, Span(0, 8))
        known = swarm.list_told()
        for _ in range(6):
            await collector.read()
            swarm.records.take_all(MODEL, known, swarm.clock.wall())
            swarm.clock.seconds += 5.0
        searches.append(swarm.num_searches)

    assert searches == [1] * 20 + [2] * 2
    await collector.close()


async def test_model_without_peers_is_forgotten_and_found_again() -> None:
    swarm = Swarm()
    await swarm.tell(1, Span(0, 8))
    collector = Collector(swarm.access, lambda change: None)
    await collector.join([])
    await collector.read()

    for _ in range(3):
        swarm.clock.seconds += 3700.0
        await collector.read()
    assert collector.state.models == {}
    await swarm.tell(1, Span(0, 8))
    for _ in range(2):
        await collector.read()

    assert list(collector.state.models) == [MODEL]
    assert len(asyncio.all_tasks()) == 1
    await collector.close()
