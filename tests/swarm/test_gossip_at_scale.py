"""What a large swarm without a directory tells its members: how soon a client finds a newcomer
whose blocks it needs, and how many strangers who lie empty a view.

Members and clients ask and answer as those that ship do; nothing is computed.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from random import Random
from typing import ClassVar

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock

from shoal.client.routing.route_finder import RouteFinder, SwarmModel
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.peer import GOSSIPS_PER_PERIOD
from shoal.protocol.errors import DirectoryError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.limits import MAX_ANNOUNCEMENTS_PER_MODEL
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.records import RecordFetch, Records
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.gossip import GossipDirectory
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.tasks import cancel_all
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcement_book import AnnouncementBook
from shoal.protocol.records.announcements import (
    Announcement,
    KnownRecord,
    check_is_current,
    sign_announcement,
)
from shoal.protocol.records.swarm_records import SwarmRecords
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION

pytestmark = pytest.mark.thorough

MODEL = SwarmModel(ModelId("a" * 32), 4, 64)
PERIOD_SECONDS = 30.0
GOSSIP_SECONDS = PERIOD_SECONDS / GOSSIPS_PER_PERIOD
SERVED, NEEDED = Span(0, 2), Span(2, 4)
NUM_CLIENTS = 10


class SilentDirectory:
    """A directory of which no node answers, until a look-up gives up. Implements Directory."""

    addresses = ()

    def __init__(self, records: SwarmRecords, patience_seconds: float) -> None:
        self.records = records
        self._patience_seconds = patience_seconds

    async def announce(self, record: bytes) -> None:
        await asyncio.sleep(self._patience_seconds)
        raise DirectoryError("nobody answers")

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        await asyncio.sleep(self._patience_seconds)
        raise DirectoryError("nobody answers")

    async def list_models(self) -> list[ModelId]:
        raise DirectoryError("nobody answers")

    async def close(self) -> None:
        pass


class TrustingRecords(SwarmRecords):
    """Checks each record once for all members, which share a process."""

    _opened: ClassVar[dict[bytes, Announcement]] = {}

    def open_announcement(self, content: bytes, now: float) -> Announcement:
        if content not in self._opened:
            self._opened[content] = super().open_announcement(content, now)
        check_is_current(self._opened[content], now)
        return self._opened[content]


class Member:
    """A peer that gossips, with nothing to serve."""

    def __init__(
        self,
        number: int,
        network: LoopbackNetwork,
        span: Span,
        book: AnnouncementBook | None = None,
    ) -> None:
        self.number = number
        self._rng = Random(number)
        self._identity = Identity(self._rng.randbytes(32))
        self.peer_id = self._identity.peer_id
        self._span = span
        self._host = f"10.0.{number >> 8}.{number & 255}"
        self._transport = LoopbackTransport(network, self._host)
        self.book = AnnouncementBook() if book is None else book
        self.records = TrustingRecords(book=self.book)
        self.directory = GossipDirectory(
            SilentDirectory(self.records, 10.0), MODEL.model_id, self._transport, VirtualClock(),
            self._rng, lambda peer: True,
        )  # fmt: skip

    async def listen(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._transport.close)
        stack.push_async_callback(self.directory.stop)
        self._endpoint = (await self._transport.listen(self._host, 0, self._serve)).endpoint

    def describe(self) -> Announcement:
        now = VirtualClock().wall()
        return describe_peer(
            peer_id=self._identity.peer_id, model_id=MODEL.model_id, num_blocks=MODEL.num_blocks,
            span=self._span, endpoints=(self._endpoint,), max_version=MAX_VERSION,
            sequence=int(1000 * now), issued_at=now, expires_at=now + 3 * PERIOD_SECONDS,
            software="shoal 0.1.0", kernels="native int8 with avx512_vnni",
        )  # fmt: skip

    def sign(self) -> bytes:
        return sign_announcement(self._identity, self.describe())

    async def run(self, pause_seconds: float = 0.0) -> None:
        """Announce, ask and tell until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.directory.run(GOSSIP_SECONDS))
            await asyncio.sleep(pause_seconds)
            while True:
                tasks.create_task(self._announce())
                await asyncio.sleep(PERIOD_SECONDS)

    async def _announce(self) -> None:
        with suppress(DirectoryError):
            await self.directory.announce(self.sign())

    async def _serve(self, stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, RecordFetch):
                answer = self._answer(stream.remote_host or "", message)
            else:
                answer = Welcome(
                    MAX_VERSION, "", self._identity.peer_id, MODEL.model_id, self._span, 0.0
                )
            await stream.send(encode_frame(answer))

    def _answer(self, stranger: str, fetch: RecordFetch) -> Records:
        return self.records.answer(
            stranger, MODEL.model_id, fetch, VirtualClock().wall(), self._rng
        )


class Liar(Member):
    """A stranger's peer, which keeps whatever it is told, and tells of other liars only.

    Every second one lets its announcement expire, to be among the hints as well.
    """

    lies: Sequence[bytes] = ()

    def describe(self) -> Announcement:
        seconds = 590.0 if self.number % 2 else 2 * PERIOD_SECONDS
        return replace(super().describe(), expires_at=VirtualClock().wall() + seconds)

    def _answer(self, stranger: str, fetch: RecordFetch) -> Records:
        most = fetch.max_bytes // len(self.lies[0])
        told = self._rng.sample(self.lies, min(most, 100, len(self.lies)))
        return Records(fetch.question, tuple(told), True)


async def find_newcomer(num_peers: int, seed: int) -> list[float]:
    """Return how long each client waited, in seconds from the newcomer's announcement.

    Half of them have looked for it before, the others begin then.
    """
    clock, rng = VirtualClock(), Random(seed)
    network = LoopbackNetwork(link=Link(delay_seconds=0.03))
    async with AsyncExitStack() as stack:
        members = [Member(number, network, SERVED) for number in range(num_peers - 1)]
        for member in members:
            await member.listen(stack)
        known = []
        for member in members:
            value = member.records.add_own(member.sign(), clock.wall()).value
            known.append((member.describe(), value))
        clients = []
        books = [member.book for member in members]
        for number in range(NUM_CLIENTS):
            book = AnnouncementBook()
            books.append(book)
            transport = LoopbackTransport(network, f"client{number}")
            stack.push_async_callback(transport.close)
            finder = RouteFinder(
                SilentDirectory(SwarmRecords(book=book), 10.0), transport, MODEL, clock,
                ClientConfig(seed=rng.randrange(2**31)),
            )  # fmt: skip
            clients.append(finder)
        for book in books:
            book.reserve(MODEL.model_id)
            for announcement, value in known:
                book.add(MODEL.model_id, announcement, value, clock.wall())
        tasks = [
            asyncio.create_task(member.run(rng.uniform(0.0, PERIOD_SECONDS))) for member in members
        ]
        tasks += [asyncio.create_task(client.keep_acquainted()) for client in clients]
        stack.push_async_callback(cancel_all, tasks)
        waited: list[float] = []

        async def wait(client: RouteFinder) -> None:
            await client.wait_for_route(Span(0, 4), clock.now() + 200.0, 0.0, [None])
            waited.append(clock.now())

        half = NUM_CLIENTS // 2
        waiting = [asyncio.create_task(wait(client)) for client in clients[:half]]
        await asyncio.sleep(5.0)
        assert not waited
        newcomer = Member(num_peers - 1, network, NEEDED)
        await newcomer.listen(stack)
        newcomer.book.reserve(MODEL.model_id)
        for member in members:
            (own,) = member.book.list_own(MODEL.model_id, clock.wall())
            newcomer.book.add(MODEL.model_id, own.announcement, own.value, clock.wall())
        began_at = clock.now()
        tasks.append(asyncio.create_task(newcomer.run()))
        waiting += [asyncio.create_task(wait(client)) for client in clients[half:]]
        await asyncio.gather(*waiting)
        for client in clients:
            await client.close()
    return [at - began_at for at in waited]


@pytest.mark.parametrize("num_peers", [100, 1_000])
async def test_newcomer_is_found_in_ten_seconds_without_a_directory(num_peers: int) -> None:
    waited = await find_newcomer(num_peers, seed=1)
    deciles = statistics.quantiles(waited, n=10)
    print(
        f"{num_peers} peers: half within {deciles[4]:.1f} s, nine of ten within {deciles[8]:.1f} s"
    )
    assert deciles[8] < 10.0


# ---- strangers

NUM_LOOKING = 20
"""Members, or newcomers, of which a half has to know nobody who is honest."""


class Attacked:
    """Honest members and liars, all known to each member, without a directory."""

    def __init__(self, num_honest: int, num_liars: int) -> None:
        self.network = LoopbackNetwork(link=Link(delay_seconds=0.03))
        self.whole = AnnouncementBook()
        """What members know that nobody looks at: everybody."""
        self.members = [
            Member(number, self.network, SERVED, self.whole if number >= NUM_LOOKING else None)
            for number in range(num_honest)
        ]
        self.liars = [Liar(2**15 + number, self.network, Span(0, 4)) for number in range(num_liars)]
        self.honest = {member.peer_id for member in self.members}

    async def open(self, stack: AsyncExitStack) -> None:
        for member in (*self.members, *self.liars):
            await member.listen(stack)
        self.whole.reserve(MODEL.model_id)
        lies = [liar.records.add_own(liar.sign(), VirtualClock().wall()) for liar in self.liars]
        for liar in self.liars:
            liar.lies = [lie.value for lie in lies]
        self.renew()
        for lie in lies:
            self.teach(self.whole, lie)
        for member in self.members[:NUM_LOOKING]:
            self.fill(member.book)

    def renew(self) -> None:
        """Have members announce themselves to those that nobody looks at."""
        for member in self.members:
            known = TrustingRecords().add_own(member.sign(), VirtualClock().wall())
            self.teach(self.whole, known)

    def teach(self, book: AnnouncementBook, known: KnownRecord) -> None:
        book.add(MODEL.model_id, known.announcement, known.value, VirtualClock().wall())

    def fill(self, book: AnnouncementBook) -> None:
        book.reserve(MODEL.model_id)
        for known in self.whole.list_records(MODEL.model_id, VirtualClock().wall()):
            self.teach(book, known)

    def count_honest(self, book: AnnouncementBook, own: PeerId | None = None) -> int:
        known = book.list_current(MODEL.model_id, VirtualClock().wall())
        return sum(peer.peer_id in self.honest and peer.peer_id != own for peer in known)


async def attack_members(num_honest: int, num_liars: int) -> list[int]:
    """Return how many honest others members know after 150 s, when whatever they knew is over."""
    async with AsyncExitStack() as stack:
        swarm = Attacked(num_honest, num_liars)
        await swarm.open(stack)
        looking = swarm.members[:NUM_LOOKING]
        rng = Random(num_liars)
        tasks = [
            asyncio.create_task(member.run(rng.uniform(0.0, PERIOD_SECONDS))) for member in looking
        ]
        stack.push_async_callback(cancel_all, tasks)
        for _ in range(5):
            await asyncio.sleep(PERIOD_SECONDS)
            swarm.renew()
        return [swarm.count_honest(member.book, member.peer_id) for member in looking]


async def attack_newcomers(num_honest: int, num_liars: int) -> list[int]:
    """Return how many honest members clients know after 30 s that have met one of them."""
    async with AsyncExitStack() as stack:
        swarm = Attacked(num_honest, num_liars)
        await swarm.open(stack)
        found = []
        for number in range(NUM_LOOKING):
            rng, met = Random(number), swarm.members[number % num_honest]
            client = Member(2**14 + number, swarm.network, SERVED)
            stack.push_async_callback(client.directory.stop)
            client.book.reserve(MODEL.model_id)
            now = VirtualClock().wall()
            fetch = client.records.make_fetch(MODEL.model_id, now, rng)
            told = met.records.answer(str(number), MODEL.model_id, fetch, now, rng)
            client.records.take_all(MODEL.model_id, told.records, now)
            client.directory.most_at_once = 24
            found.append(client)
        for _ in range(6):
            await asyncio.sleep(5.0)
            looks = (client.directory.lookup(MODEL.model_id) for client in found)
            await asyncio.gather(*looks, return_exceptions=True)
        return [swarm.count_honest(client.book) for client in found]


@pytest.mark.parametrize("attack", [attack_members, attack_newcomers])
@pytest.mark.parametrize("num_honest", [10, 100, 1_000])
async def test_twenty_liars_for_each_honest_peer_empty_few_views(
    attack: Callable[[int, int], Awaitable[list[int]]], num_honest: int
) -> None:
    """Twenty, or as many as a book holds; then ever more of them, until half of the views are
    empty.
    """
    most = MAX_ANNOUNCEMENTS_PER_MODEL - num_honest
    num_liars, medians = 0, list[float]()
    while num_liars < most and 0 not in medians:
        num_liars = min(4 * num_liars or 20 * num_honest, most)
        known = await attack(num_honest, num_liars)
        medians.append(statistics.median(known))
        print(
            f"{attack.__name__}: with {num_liars} liars, half know {medians[-1]:.0f} or more of "
            f"{num_honest} honest peers, all {min(known)} or more"
        )

    assert medians[0] > 0
