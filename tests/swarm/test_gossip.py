"""What clients and peers know outlives the directory, and everybody whom they have met first."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from announcements import describe_peer
from memory_swarm import MODEL_ID, Inside, MemorySwarm
from virtual_swarm import HIDDEN, PERIOD_SECONDS, WHOLE, draw
from virtual_time import VirtualClock

from shoal.client.routing.route_finder import GOSSIP_BYTES, SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.session.session import RemoteSession
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.process.config import PeerConfig
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError, NotAMemberError, RefusedError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import NO_MEMBERSHIP, Membership, Role, make_owner
from shoal.protocol.messages.codec import decode_frame, encode_frame, read_answer
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.records import MAX_RECORDS_BYTES, RecordFetch, Records
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.dialling import greet_peer
from shoal.protocol.net.gossip import GossipDirectory
from shoal.protocol.net.memory.loopback import (
    Link,
    LoopbackNetwork,
    LoopbackStream,
    LoopbackTransport,
)
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.network import Presence
from shoal.protocol.net.tasks import cancel_all
from shoal.protocol.net.transport import Stream, StreamServer
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.records.swarm_records import SwarmRecords
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION

pytestmark = pytest.mark.slow

ELSEWHERE = Endpoint("elsewhere", 4000, "e" * 64)
OVERLAP_SECONDS = 35.0
HALVES = (Span(0, 2), Span(2, 4))
MEMBER = make_owner(bytes(range(16))).as_role(Role.SERVE)


class LostDirectory(MemoryDirectory):
    """A directory whose contacts all die: the swarm goes on without this member."""

    is_lost = False
    is_silent = False
    silent_seconds = 3600.0
    slow_seconds = 0.0
    num_looks = 0

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self.num_looks += 1
        if self.is_silent:
            await asyncio.sleep(self.silent_seconds)
            raise DirectoryError("every contact is gone")
        await asyncio.sleep(self.slow_seconds)
        return await super().lookup(model_id)

    def check_is_reachable(self) -> None:
        if self.is_lost:
            raise DirectoryError("every contact is gone")
        super().check_is_reachable()


class NotingTransport(LoopbackTransport):
    """Notes which hosts were dialled."""

    def __init__(
        self, network: LoopbackNetwork, host: str, membership: Membership = NO_MEMBERSHIP
    ) -> None:
        super().__init__(network, host, membership)
        self.dialled = Counter[str]()

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> LoopbackStream:
        self.dialled[endpoint.host] += 1
        return await super().open_stream(endpoint, timeout_seconds)


class World:
    """Peers of a model of 4 blocks, and clients; all are closed when the test is over."""

    def __init__(self, model: str, stack: AsyncExitStack, membership: Membership) -> None:
        self.swarm = MemorySwarm(membership=membership)
        self._model = model
        self._stack = stack

    async def add(self, host: str, span: Span) -> Inside:
        config = PeerConfig(
            self._model, span, weights="fp32", kv_budget_bytes=2**22, block_cache_bytes=0,
            drain_seconds=0.0, announce_period_seconds=PERIOD_SECONDS,
        )  # fmt: skip
        return await self._stack.enter_async_context(self.swarm.serve(host, config))

    async def add_liar(self, number: int) -> Liar:
        liar = Liar(Identity(bytes([number]) * 32))
        transport = LoopbackTransport(self.swarm.network, f"liar{number}")
        self._stack.push_async_callback(transport.close)
        liar.endpoint = (await transport.listen(f"liar{number}", 0, liar.serve)).endpoint
        await self.swarm.open_directory().announce(liar.sign())
        return liar

    async def join(self, host: str = "client", seed: int = 7, **settings: Any) -> Client:
        directory = LostDirectory(self.swarm.store, VirtualClock())
        client = Client(self.swarm, host, directory)
        client.joined = await AsyncClient.join(
            ClientConfig(seed=seed, **settings),
            client,
            VirtualClock(),
            SwarmModel(MODEL_ID, WHOLE.stop, HIDDEN),
        )
        self._stack.push_async_callback(client.joined.close)
        return client

    async def open_gossip(self) -> tuple[GossipDirectory, LostDirectory, NotingTransport]:
        """Return what a newcomer has that has read the directory once."""
        directory = LostDirectory(self.swarm.store, VirtualClock())
        await directory.lookup(MODEL_ID)
        transport = NotingTransport(self.swarm.network, "newcomer")
        self._stack.push_async_callback(transport.close)
        gossip = GossipDirectory(
            directory, MODEL_ID, transport, VirtualClock(), Random(1), lambda _: True
        )
        self._stack.push_async_callback(gossip.stop)
        return gossip, directory, transport

    def kill(self, *hosts: str) -> None:
        for host in hosts:
            self.swarm.network.kill(host)


class Liar:
    """A peer that tells of nobody but itself, and of whom it `invented`."""

    endpoint: Endpoint

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._records = SwarmRecords()
        self.invented: tuple[bytes, ...] = ()
        self.asked_bytes: list[int] = []

    def sign(self) -> bytes:
        now = VirtualClock().wall()
        announcement = describe_peer(
            peer_id=self._identity.peer_id, model_id=MODEL_ID, num_blocks=WHOLE.stop, span=WHOLE,
            endpoints=(self.endpoint,), max_version=MAX_VERSION, sequence=int(1000 * now),
            issued_at=now, expires_at=now + 3 * PERIOD_SECONDS,
        )  # fmt: skip
        return sign_announcement(self._identity, announcement)

    async def serve(self, stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, RecordFetch):
                self.asked_bytes.append(message.max_bytes)
                value = self._records.add_own(self.sign(), VirtualClock().wall()).value
                told = (value, *self.invented)
                answer: Message = Records(message.question, told, has_own=bool(message.own))
            else:
                answer = Welcome(MAX_VERSION, "liar", self._identity.peer_id, MODEL_ID, WHOLE, 0.0)
            await stream.send(encode_frame(answer))


class Client:
    """A client whose directory can be lost. Implements Network."""

    joined: AsyncClient

    def __init__(self, swarm: MemorySwarm, host: str, directory: LostDirectory) -> None:
        self.directory = directory
        membership = swarm.store.records.membership
        self.transport = NotingTransport(swarm.network, host, membership)

    async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
        return self.transport, self.directory

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        raise NotImplementedError

    @asynccontextmanager
    async def open_session(self) -> AsyncGenerator[RemoteSession]:
        session = self.joined.open_session(64, WHOLE)
        try:
            yield session
        finally:
            await session.close()


@asynccontextmanager
async def open_world(models: Any, membership: Membership = NO_MEMBERSHIP) -> AsyncGenerator[World]:
    async with AsyncExitStack() as stack:
        yield World(str(models.get("llama").directory), stack, membership)


async def replace_everybody(world: World, client: Client) -> None:
    """Let others serve all blocks; then those that were there first die, and the directory with
    them.
    """
    for number, span in enumerate(HALVES):
        await world.add(f"new{number}", span)
    await asyncio.sleep(OVERLAP_SECONDS)
    world.kill("old0", "old1")
    client.directory.is_lost = True


@pytest.mark.parametrize("membership", [NO_MEMBERSHIP, MEMBER], ids=str)
async def test_session_and_idle_client_outlive_everybody_whom_they_have_met(
    tiny_models: Any, membership: Membership
) -> None:
    async with open_world(tiny_models, membership) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"old{number}", span)
        client = await world.join()
        inputs = draw(1, 6)
        async with client.open_session() as undisturbed:
            expected = await undisturbed.step(inputs)
        async with client.open_session() as running:
            begun = await running.step(inputs[:, :4])

            await replace_everybody(world, client)
            rest = await running.step(inputs[:, 4:])

        async with client.open_session() as another:
            assert torch.allclose(await another.step(inputs), expected, atol=1e-5)
        assert torch.allclose(torch.cat([begun, rest], dim=1), expected, atol=1e-5)


async def test_session_goes_on_with_a_peer_that_others_told_of_before_anybody_is_asked(
    tiny_models: Any,
) -> None:
    """A directory that answers nobody any more would take two seconds."""
    async with open_world(tiny_models) as world:
        await world.add("old", WHOLE)
        client = await world.join()
        inputs = draw(1, 6)
        async with client.open_session() as running:
            await running.step(inputs[:, :4])
            await world.add("new", WHOLE)
            await asyncio.sleep(OVERLAP_SECONDS)
            world.kill("old")
            client.directory.is_silent = True
            num_looks = client.directory.num_looks

            await running.step(inputs[:, 4:])

            assert client.directory.num_looks == num_looks


async def test_swarm_whose_directory_is_dead_goes_on_and_heals(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        peers = [await world.add(f"peer{number}", span) for number, span in enumerate(HALVES)]
        client = await world.join()

        world.swarm.store.is_reachable = False
        await asyncio.sleep(10 * PERIOD_SECONDS)
        view = await client.joined.swarm.book.refresh()

        assert {peer.peer_id for peer in view.online} == {peer.peer_id for peer in peers}
        async with client.open_session() as session:
            await session.step(draw(1, 3))
        with pytest.raises(DirectoryError):
            await world.join("too early")
        world.swarm.store.is_reachable = True
        await asyncio.sleep(PERIOD_SECONDS)
        newcomer = await world.join("newcomer")
        assert not newcomer.joined.swarm.book.view.gaps


@pytest.mark.parametrize("seed", range(3))
async def test_new_peer_is_used_at_once_by_a_session_that_waits_for_it(
    tiny_models: Any, seed: int
) -> None:
    async with open_world(tiny_models) as world:
        await world.add("first", HALVES[0])
        await world.add(f"lost{seed}", HALVES[1])
        client = await world.join()
        async with client.open_session() as session:
            await session.step(draw(1, 3))
            client.directory.is_lost = True
            world.kill(f"lost{seed}")
            waiting = asyncio.create_task(session.step(draw(2, 1)))
            await asyncio.sleep(5.0)
            assert not waiting.done()

            await world.add("new", HALVES[1])
            async with asyncio.timeout(1.0):
                await waiting


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "idle"])
async def test_new_peer_is_usable_ten_seconds_after_its_announcement(
    tiny_models: Any, seed: int, is_running: bool
) -> None:
    """More peers than it tells at once; nobody but the new peer can read or write the directory."""
    async with open_world(tiny_models) as world:
        for number in range(20):
            await world.add(f"peer{number}", HALVES[0])
        await world.add("lost", HALVES[1])
        client = await world.join(seed=seed)
        async with client.open_session() as session:
            if is_running:
                await session.step(draw(1, 3))
            client.directory.is_lost = True
            world.kill("lost")
            await asyncio.sleep(5.0)

            await world.add("new", HALVES[1])
            world.swarm.store.is_reachable = False
            async with asyncio.timeout(10.0):
                await session.step(draw(2, 1))


async def test_dead_peer_is_not_routed_to_by_hearsay(tiny_models: Any) -> None:
    """What nobody renews expires everywhere, however often it is told."""
    async with open_world(tiny_models) as world:
        for number, span in enumerate((WHOLE, *HALVES)):
            await world.add(f"peer{number}", span)
        client = await world.join()
        world.swarm.store.is_reachable = False

        world.kill("peer0")
        await asyncio.sleep(4 * PERIOD_SECONDS)
        view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


@pytest.mark.parametrize("num_liars", [3, 10])
async def test_peers_that_tell_only_of_themselves_hide_nobody(
    tiny_models: Any, num_liars: int
) -> None:
    """They answer before all others."""
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"old{number}", span)
        for number in range(num_liars):
            await world.add_liar(100 + number)
        for host in ("old0", "old1"):
            world.swarm.network.set_link("client", host, Link(delay_seconds=0.05))
        client = await world.join()
        client.directory.is_lost = True

        num_missed = 0
        for _ in range(50):
            await asyncio.sleep(PERIOD_SECONDS)
            view = await client.joined.swarm.book.refresh()
            honest = {peer.span for peer in view.online if peer.span != WHOLE}
            num_missed += honest != set(HALVES)
        assert num_missed <= 10  # of 50; those who are missed come back


async def test_client_that_was_away_finds_back_by_what_has_expired(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
        client = await world.join()
        client.directory.is_lost = True
        for host in ("peer0", "peer1"):
            world.swarm.network.partition("client", host)

        await asyncio.sleep(10 * PERIOD_SECONDS)
        records, now = client.directory.records, VirtualClock().wall()
        assert records.list_current(MODEL_ID, now) == []
        assert len(records.list_hints(MODEL_ID, now)) == 2
        for host in ("peer0", "peer1"):
            world.swarm.network.heal("client", host)

        view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


async def test_peers_are_asked_beside_a_directory_that_is_silent(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
        client = await world.join()
        client.directory.is_silent = True
        await asyncio.sleep(1.0)  # or the view is new enough

        async with asyncio.timeout(3.0):
            view = await client.joined.swarm.book.refresh()

        assert sorted(peer.span for peer in view.online) == sorted(HALVES)


async def test_slow_directory_is_read_to_its_end_though_liars_answer_first(
    tiny_models: Any,
) -> None:
    """It takes longer than its share of a look; the liars tell only of themselves."""
    async with open_world(tiny_models) as world:
        await world.add_liar(100)
        gossip, directory, _ = await world.open_gossip()
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
        directory.slow_seconds = 3.0
        await asyncio.sleep(1.0)

        spans: list[set[Span]] = []
        for _ in range(2):
            async with asyncio.timeout(3.5):
                spans.append({peer.span for peer in await gossip.lookup(MODEL_ID, 5.0)})
            await asyncio.sleep(1.1)  # three seconds in all, and more

        assert spans == [{WHOLE}, {WHOLE, *HALVES}]
        assert directory.num_looks == 2


async def test_directory_that_answers_late_is_heard_before_peers_that_are_silent(
    tiny_models: Any,
) -> None:
    async with open_world(tiny_models) as world:
        for number in range(9):
            await world.add(f"peer{number}", WHOLE)
        gossip, directory, _ = await world.open_gossip()
        for number in range(9):
            world.swarm.network.pause(f"peer{number}")
        await world.add("new", HALVES[0])
        directory.slow_seconds = 2.5
        await asyncio.sleep(1.0)

        async with asyncio.timeout(2.6):
            assert HALVES[0] in {peer.span for peer in await gossip.lookup(MODEL_ID)}


async def test_those_who_look_at_once_have_the_directory_read_once(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        await world.add("peer", WHOLE)
        gossip, directory, _ = await world.open_gossip()
        directory.slow_seconds = 1.0
        before = directory.num_looks

        found = await asyncio.gather(*(gossip.lookup(MODEL_ID) for _ in range(10)))

        assert [len(peers) for peers in found] == [1] * 10
        assert directory.num_looks == before + 1


async def test_directory_that_fails_while_peers_are_asked_is_no_unread_error(
    tiny_models: Any,
) -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: problems.append(context["message"])
    )
    async with open_world(tiny_models) as world:
        for number, span in enumerate(HALVES):
            await world.add(f"peer{number}", span)
            world.swarm.network.set_link(f"peer{number}", "client", Link(delay_seconds=0.1))
        client = await world.join()
        client.directory.is_silent = True
        client.directory.silent_seconds = 2.05
        await asyncio.sleep(1.0)  # or the view is new enough

        await client.joined.swarm.book.refresh()

    gc.collect()
    assert problems == []


async def test_blocked_peer_is_asked_nothing(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        peer = await world.add("peer0", WHOLE)
        client = await world.join(blocked_servers=[peer.peer_id])
        client.directory.is_lost = True

        await asyncio.sleep(PERIOD_SECONDS)

        with pytest.raises(DirectoryError):
            await client.joined.swarm.book.refresh()


@pytest.mark.parametrize("has_peers", [True, False])
async def test_announcement_needs_the_directory_or_a_peer_that_keeps_it(
    tiny_models: Any, has_peers: bool
) -> None:
    async with open_world(tiny_models) as world:
        await world.add("other", WHOLE)
        client = await world.join()
        client.directory.is_lost = True
        directory, clock = LostDirectory(world.swarm.store, VirtualClock()), VirtualClock()
        await directory.lookup(MODEL_ID)
        directory.is_lost = True
        transport = LoopbackTransport(world.swarm.network, "newcomer")
        gossip = GossipDirectory(directory, MODEL_ID, transport, clock, Random(1), lambda _: True)
        if not has_peers:
            world.kill("other")
        newcomer = Identity(bytes(32))
        (seen,) = directory.records.list_current(MODEL_ID, clock.wall())
        own = replace(seen, peer_id=newcomer.peer_id, endpoints=(ELSEWHERE,))
        record = sign_announcement(newcomer, own)

        if not has_peers:
            with pytest.raises(DirectoryError):
                await gossip.announce(record)
        else:
            await gossip.announce(record)
            await asyncio.sleep(1.1)  # or the view is new enough
            view = await client.joined.swarm.book.refresh()
            assert newcomer.peer_id in {peer.peer_id for peer in view.online}
        await transport.close()


@pytest.mark.parametrize("has_honest", [False, True])
async def test_one_liar_confirms_no_announcement_that_others_refuse(
    tiny_models: Any, has_honest: bool
) -> None:
    async with open_world(tiny_models) as world:
        await world.add_liar(100)
        honest = [await world.add("peer", WHOLE)] if has_honest else []
        gossip, directory, _ = await world.open_gossip()
        directory.is_lost = True
        await asyncio.sleep(1.0)  # or what the peer has read is new enough
        identity, now = Identity(bytes(32)), VirtualClock().wall()
        stale = describe_peer(
            peer_id=identity.peer_id, model_id=MODEL_ID, num_blocks=WHOLE.stop, span=WHOLE,
            sequence=1, issued_at=now, expires_at=now + PERIOD_SECONDS,
        )  # fmt: skip
        for inside in honest:  # it knows a newer one
            newer = replace(stale, sequence=2, expires_at=now + 2 * PERIOD_SECONDS)
            await world.swarm.open_directory().announce(sign_announcement(identity, newer))
            await inside.peer.announcer._directory.lookup(MODEL_ID)

        announcing = gossip.announce(sign_announcement(identity, stale))

        if has_honest:
            with pytest.raises(DirectoryError):
                await announcing
        else:
            await announcing


# ---- peers that do not answer


@pytest.mark.parametrize("seed", range(3))
async def test_peers_are_asked_side_by_side_while_some_stand_still(
    tiny_models: Any, seed: int
) -> None:
    async with open_world(tiny_models) as world:
        for number in range(6):
            await world.add(f"peer{number}", WHOLE)
        client = await world.join(seed=seed)
        client.directory.is_lost = True
        for number in range(5):
            world.swarm.network.pause(f"peer{number}")
        await asyncio.sleep(1.0)  # or the view is new enough

        # One answer is waited for, at most 3 s, and the others half a second more.
        async with asyncio.timeout(4.0):
            view = await client.joined.swarm.book.refresh()

        assert len(view.online) == 6
        assert client.transport.dialled["peer5"] == 1


async def test_peers_that_did_not_answer_are_asked_after_those_that_did(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        for number in range(9):
            await world.add(f"peer{number}", WHOLE)
        client = await world.join()
        client.directory.is_lost = True
        dead = [f"peer{number}" for number in range(6)]
        world.kill(*dead)

        for _ in range(40):
            await asyncio.sleep(1.1)
            await client.joined.swarm.book.refresh()

        # They rest for 2, 4, 8, 16 and 32 s: five times in 44 s, and once more at the end.
        assert all(1 <= client.transport.dialled[host] <= 6 for host in dead)


# ---- how often, and for how much


async def test_peer_that_many_made_up_announcements_name_is_asked_no_more_often_than_others(
    tiny_models: Any,
) -> None:
    async with open_world(tiny_models) as world:
        for number in range(10):
            await world.add(f"peer{number}", WHOLE)
        gossip, directory, transport = await world.open_gossip()
        records, now = gossip.records, VirtualClock().wall()
        target = next(
            one for one in records.list_current(MODEL_ID, now) if "peer0" in one.endpoints[0].host
        )
        for number in range(2, 202):
            made_up = Liar(Identity(bytes([number]) * 32))
            (made_up.endpoint,) = target.endpoints
            records.take(MODEL_ID, SwarmRecords().add_own(made_up.sign(), now).value, now)
        directory.is_lost = True

        for _ in range(40):
            await asyncio.sleep(1.1)  # or the view is new enough
            await gossip.lookup(MODEL_ID)

        assert len(records.list_current(MODEL_ID, now)) == 210
        # Each time 3 of 10 addresses, so 12 times.
        assert 1 <= transport.dialled["peer0"] <= 20


async def test_what_peers_told_is_new_enough_for_a_second(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        await world.add("peer", WHOLE)
        gossip, directory, transport = await world.open_gossip()
        directory.is_lost = True

        for seconds, num_dialled in ((0.0, 1), (0.5, 1), (0.6, 2)):
            await asyncio.sleep(seconds)
            await gossip.lookup(MODEL_ID)
            assert transport.dialled["peer"] == num_dialled


async def test_directory_is_read_again_once_what_it_said_is_too_old(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        await world.add("peer", WHOLE)
        gossip, _, _ = await world.open_gossip()
        await gossip.lookup(MODEL_ID)
        await world.add("other", WHOLE)

        await asyncio.sleep(9.0)
        assert len(await gossip.lookup(MODEL_ID, 10.0)) == 1
        await asyncio.sleep(2.0)
        assert len(await gossip.lookup(MODEL_ID, 10.0)) == 2


@pytest.mark.parametrize("max_bytes", [GOSSIP_BYTES, MAX_RECORDS_BYTES])
async def test_peer_is_asked_for_so_much_and_believed_no_more(
    tiny_models: Any, max_bytes: int
) -> None:
    async with open_world(tiny_models) as world:
        liar = await world.add_liar(1)
        others = [Liar(Identity(bytes([number]) * 32)) for number in range(2, 42)]
        for number, other in enumerate(others):
            other.endpoint = Endpoint("elsewhere", 1, f"{number:064x}")
        now = VirtualClock().wall()
        values = [SwarmRecords().add_own(one.sign(), now).value for one in others]
        assert GOSSIP_BYTES < sum(map(len, values)) < MAX_RECORDS_BYTES // 2
        liar.invented = tuple(values)
        gossip, _, _ = await world.open_gossip()

        running = asyncio.create_task(gossip.run(1.0, max_bytes))
        await asyncio.sleep(2.0)
        await cancel_all([running])

        assert set(liar.asked_bytes) == {max_bytes}
        num_known = len(gossip.records.list_current(MODEL_ID, VirtualClock().wall()))
        assert num_known == (1 if max_bytes == GOSSIP_BYTES else 41)


async def test_idle_client_asks_for_little(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        liar = await world.add_liar(1)
        await world.join()

        await asyncio.sleep(4 * PERIOD_SECONDS)

        assert set(liar.asked_bytes) == {GOSSIP_BYTES}


# ---- questions


async def test_second_question_on_a_stream_is_refused(tiny_models: Any) -> None:
    async with open_world(tiny_models) as world:
        inside = await world.add("peer", WHOLE)
        client = await world.join()
        clock = VirtualClock()
        fetch = client.directory.records.make_fetch(MODEL_ID, clock.wall(), Random(1))
        stream = await client.transport.open_stream(inside.endpoint)
        await greet_peer(stream, inside.peer.announcer.peer_id, clock)

        await stream.send(encode_frame(fetch))
        assert isinstance(decode_frame(await stream.receive() or b""), Records)
        await stream.send(encode_frame(fetch))

        with pytest.raises(RefusedError, match="once on a stream"):
            read_answer(await stream.receive(), "the peer", fetch.question)
        assert await stream.receive() is None
        await stream.close()


@pytest.mark.parametrize("has_proof", [False, True], ids=["outside", "inside"])
async def test_stranger_in_a_private_swarm_is_neither_told_nor_believed(
    tiny_models: Any, has_proof: bool
) -> None:
    """He knows where a peer is; with a proof of membership, he can even dial it."""
    async with open_world(tiny_models, MEMBER) as world:
        peer = await world.add("peer", HALVES[0])
        await world.add("other", HALVES[1])
        client = await world.join()
        clock = VirtualClock()
        (seen,) = (
            known
            for known in client.directory.records.list_records(MODEL_ID, clock.wall())
            if known.announcement.peer_id == peer.peer.announcer.peer_id
        )
        record = client.directory.records.open(seen.value)[MEMBER.certificate_bytes :]
        store = MemoryDirectoryStore()
        store.records.take(MODEL_ID, store.records.seal(record), clock.wall())
        directory = LostDirectory(store, clock)
        await directory.lookup(MODEL_ID)
        transport = NotingTransport(
            world.swarm.network, "stranger", MEMBER if has_proof else NO_MEMBERSHIP
        )
        gossip = GossipDirectory(directory, MODEL_ID, transport, clock, Random(1), lambda _: True)
        if not has_proof:
            with pytest.raises(NotAMemberError, match="private swarm"):
                await transport.open_stream(seen.announcement.endpoints[0])
        identity = Identity(bytes(32))
        own = replace(seen.announcement, peer_id=identity.peer_id, endpoints=(ELSEWHERE,))

        await gossip.announce(sign_announcement(identity, own))

        assert not await gossip.tell()
        directory.is_lost = True
        with pytest.raises(DirectoryError):
            await gossip.lookup(MODEL_ID)
        assert transport.dialled["peer"] >= 2
        assert {one.peer_id for one in directory.records.list_current(MODEL_ID, clock.wall())} == {
            seen.announcement.peer_id,
            identity.peer_id,
        }
        client.directory.is_lost = True
        await asyncio.sleep(PERIOD_SECONDS)
        view = await client.joined.swarm.book.refresh()
        assert identity.peer_id not in {one.peer_id for one in view.peers}
        assert len(view.peers) == 2
        await transport.close()
