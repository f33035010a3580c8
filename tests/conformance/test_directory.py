"""What every directory must do; the same tests run against each implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from shoal.peer.announcing.announcer import Announcer
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError, LocalProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span

MODEL, OTHER_MODEL = ModelId("a" * 32), ModelId("b" * 32)


class ManualClock:
    """Stands still until told. Starts now, because hivemind expires records by the real clock."""

    def __init__(self) -> None:
        self.seconds = time.time()

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


Test = Callable[[Directory, Directory, ManualClock], Coroutine[Any, Any, None]]
Run = Callable[[Test], None]
Open = Callable[[ManualClock, int], AbstractAsyncContextManager[list[Directory]]]


@asynccontextmanager
async def open_memory(clock: ManualClock, num_directories: int) -> AsyncIterator[list[Directory]]:
    store = MemoryDirectoryStore()
    yield [MemoryDirectory(store, clock) for _ in range(num_directories)]


@asynccontextmanager
async def open_hivemind(clock: ManualClock, num_directories: int) -> AsyncIterator[list[Directory]]:
    from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

    directories: list[Directory] = []
    try:
        for _ in range(num_directories):
            addresses = directories[0].addresses if directories else ()
            directories.append(await HivemindDirectory.join(addresses, identity=None, clock=clock))
        yield directories
    finally:
        for directory in directories:
            await directory.close()


@pytest.fixture(params=["memory", pytest.param("hivemind", marks=pytest.mark.network)])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test with two directories that share a store, and their clock."""
    open_directories: Open = {"memory": open_memory, "hivemind": open_hivemind}[request.param]

    def run_test(test: Test) -> None:
        async def main() -> None:
            clock = ManualClock()
            async with open_directories(clock, 2) as (ours, theirs):
                await test(ours, theirs, clock)

        asyncio.run(main())

    return run_test


def make_announcement(clock: ManualClock, number: int = 1, **changes: Any) -> Announcement:
    fields: dict[str, Any] = {
        "peer_id": Identity(bytes([number]) * 32).peer_id,
        "model_id": MODEL,
        "num_blocks": 8,
        "span": Span(0, 4),
        "state": PeerState.ONLINE,
        "endpoints": (Endpoint("127.0.0.1", 4000, "c" * 64),),
        "min_version": 1,
        "max_version": 1,
        "weights": "int8",
        "compute_dtype": "fp32",
        "sequence": 1,
        "issued_at": clock.wall(),
        "expires_at": clock.wall() + 90,
    }
    return Announcement(**(fields | changes))


def sign(announcement: Announcement, number: int = 1) -> bytes:
    return sign_announcement(Identity(bytes([number]) * 32), announcement)


def test_directory_shows_announcements_to_everybody(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        first, second = make_announcement(clock, 1), make_announcement(clock, 2)

        await ours.announce(sign(first, 1))
        await theirs.announce(sign(second, 2))

        assert sorted(await ours.lookup(MODEL), key=str) == sorted([first, second], key=str)
        assert sorted(await theirs.lookup(MODEL), key=str) == sorted([first, second], key=str)

    run(test)


def test_directory_knows_nothing_of_a_model_that_nobody_serves(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        assert await ours.lookup(MODEL) == []
        assert await theirs.lookup(MODEL) == []

    run(test)


def test_newer_announcement_replaces_older(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        await ours.announce(sign(make_announcement(clock)))
        assert len(await theirs.lookup(MODEL)) == 1
        clock.seconds += 1
        newer = make_announcement(clock, sequence=2, span=Span(4, 8))

        await ours.announce(sign(newer))

        assert await theirs.lookup(MODEL) == [newer]
        assert await ours.lookup(MODEL) == [newer]

    run(test)


def test_older_announcement_does_not_replace_newer(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        older = make_announcement(clock)
        clock.seconds += 1
        newer = make_announcement(clock, sequence=2)
        await ours.announce(sign(newer))

        with pytest.raises(DirectoryError, match=r"newer|no replica"):
            await ours.announce(sign(older))
        with pytest.raises(DirectoryError, match=r"newer|no replica"):
            await theirs.announce(sign(older))

        assert await ours.lookup(MODEL) == [newer]
        assert await theirs.lookup(MODEL) == [newer]

    run(test)


def test_peer_that_restarts_with_a_shorter_period_is_seen_at_once(run: Run) -> None:
    """A DHT keeps the record that expires later, so the new one has to go on from the old one."""

    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        def make_announcer(directory: Directory, lifetime_seconds: float) -> Announcer:
            def describe(state: PeerState, sequence: int, now: float) -> Announcement:
                return make_announcement(
                    clock, state=state, sequence=sequence, expires_at=now + lifetime_seconds
                )

            return Announcer(directory, Identity(bytes([1]) * 32), describe, clock, 1.0)

        await make_announcer(ours, 300.0).announce(PeerState.OFFLINE)
        clock.seconds += 1

        restarted = make_announcer(theirs, 3.0)
        for state in (PeerState.JOINING, PeerState.ONLINE):
            await restarted.announce(state)
            assert [a.state for a in await ours.lookup(MODEL)] == [state]
            assert [a.state for a in await theirs.lookup(MODEL)] == [state]

    run(test)


def test_same_announcement_can_be_published_again(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        announcement = make_announcement(clock)

        await ours.announce(sign(announcement))
        await ours.announce(sign(announcement))

        assert await theirs.lookup(MODEL) == [announcement]

    run(test)


def test_announcement_vanishes_when_it_expires(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        await ours.announce(sign(make_announcement(clock)))

        clock.seconds += 89.9
        assert len(await theirs.lookup(MODEL)) == 1
        clock.seconds += 0.2
        assert await theirs.lookup(MODEL) == []
        assert await ours.lookup(MODEL) == []

    run(test)


def test_models_are_separate(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        one, other = make_announcement(clock), make_announcement(clock, model_id=OTHER_MODEL)

        await ours.announce(sign(one))
        await ours.announce(sign(other))

        assert await theirs.lookup(MODEL) == [one]
        assert await theirs.lookup(OTHER_MODEL) == [other]

    run(test)


def test_peer_that_left_is_visible_as_offline(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        for sequence, state in enumerate(PeerState, start=1):
            clock.seconds += 0.01
            await ours.announce(sign(make_announcement(clock, sequence=sequence, state=state)))
            assert [a.state for a in await theirs.lookup(MODEL)] == [state]

        assert [a.state for a in await theirs.lookup(MODEL)] == [PeerState.OFFLINE]

    run(test)


def test_record_that_does_not_hold_is_our_own_fault_and_not_published(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        record = sign(make_announcement(clock))
        expired = sign(
            make_announcement(clock, 2, issued_at=clock.wall() - 90, expires_at=clock.wall()), 2
        )

        for bad in (record[:-1], b"", record[:-1] + b"x", expired):
            with pytest.raises(LocalProtocolError):
                await ours.announce(bad)

        assert await ours.lookup(MODEL) == []
        assert await theirs.lookup(MODEL) == []

    run(test)


def test_closed_directory_refuses_and_closes_twice(run: Run) -> None:
    async def test(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
        announcement = make_announcement(clock)
        await ours.announce(sign(announcement))

        await ours.close()
        await ours.close()

        with pytest.raises(DirectoryError, match="closed"):
            await ours.lookup(MODEL)
        with pytest.raises(DirectoryError, match="closed"):
            await ours.announce(sign(announcement))
        assert await theirs.lookup(MODEL) == [announcement]

    run(test)


def test_memory_directory_can_be_cut_off() -> None:
    async def main() -> None:
        clock, store = ManualClock(), MemoryDirectoryStore()
        directory = MemoryDirectory(store, clock)
        announcement = make_announcement(clock)
        await directory.announce(sign(announcement))

        store.is_reachable = False
        with pytest.raises(DirectoryError, match="cannot be reached"):
            await directory.lookup(MODEL)

        store.is_reachable = True
        assert await directory.lookup(MODEL) == [announcement]

    asyncio.run(main())
