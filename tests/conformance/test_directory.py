"""What every directory must do; the same tests run against each implementation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from announcements import MODEL, identity_of, make_announcement, sign
from async_tests import RunAsync

from shoal.peer.announcing.announcer import Announcer
from shoal.protocol.errors import DirectoryError, LocalProtocolError, RemoteProtocolError
from shoal.protocol.ids import ModelId
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import Announcement, KnownRecord, PeerState
from shoal.protocol.spans import Span

OTHER_MODEL = ModelId("b" * 32)


class ManualClock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.seconds = time.time()

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", pytest.param("hivemind", marks=pytest.mark.network)])
def directories(
    request: pytest.FixtureRequest, clock: ManualClock, run_async: RunAsync
) -> Iterator[list[Directory]]:
    """Two directories that share a store."""
    if request.param == "memory":
        store = MemoryDirectoryStore()
        yield [MemoryDirectory(store, clock) for _ in range(2)]
        return
    from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

    first = run_async(HivemindDirectory.join((), identity=None, clock=clock))
    second = run_async(HivemindDirectory.join(first.addresses, identity=None, clock=clock))
    yield [first, second]
    for directory in (first, second):
        run_async(directory.close())


@pytest.fixture
def ours(directories: list[Directory]) -> Directory:
    return directories[0]


@pytest.fixture
def theirs(directories: list[Directory]) -> Directory:
    return directories[1]


def announce(clock: ManualClock, number: int = 1, **changes: Any) -> Announcement:
    return make_announcement(number, clock.wall(), **changes)


async def test_directory_shows_announcements_to_everybody(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    first, second = announce(clock, 1), announce(clock, 2)

    await ours.announce(sign(first, 1))
    await theirs.announce(sign(second, 2))

    assert sorted(await ours.lookup(MODEL), key=str) == sorted([first, second], key=str)
    assert sorted(await theirs.lookup(MODEL), key=str) == sorted([first, second], key=str)


async def test_directory_knows_nothing_of_a_model_that_nobody_serves(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    assert await ours.lookup(MODEL) == []
    assert await theirs.lookup(MODEL) == []


async def test_directory_lists_the_models_that_somebody_serves(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    assert await theirs.list_models() == []
    await ours.announce(sign(announce(clock, 1), 1))
    await theirs.announce(sign(announce(clock, 2, model_id=OTHER_MODEL), 2))
    left = announce(clock, 3, model_id=ModelId("c" * 32), state=PeerState.OFFLINE)
    await ours.announce(sign(left, 3))

    assert sorted(await ours.list_models()) == sorted(await theirs.list_models())
    assert set(await theirs.list_models()) == {MODEL, OTHER_MODEL}
    assert len(await ours.lookup(OTHER_MODEL)) == 1


async def test_newer_announcement_replaces_older(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    await ours.announce(sign(announce(clock)))
    assert len(await theirs.lookup(MODEL)) == 1
    clock.seconds += 1
    newer = announce(clock, sequence=2, span=Span(4, 8))

    await ours.announce(sign(newer))

    assert await theirs.lookup(MODEL) == [newer]
    assert await ours.lookup(MODEL) == [newer]
    with contextlib.suppress(DirectoryError):
        await ours.announce(sign(newer))  # again
    assert await theirs.lookup(MODEL) == [newer]


async def test_older_announcement_does_not_replace_newer(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    older = announce(clock)
    clock.seconds += 1
    newer = announce(clock, sequence=2)
    await ours.announce(sign(newer))

    with pytest.raises(DirectoryError, match=r"newer|no node"):
        await ours.announce(sign(older))
    with pytest.raises(DirectoryError, match=r"newer|no node"):
        await theirs.announce(sign(older))

    assert await ours.lookup(MODEL) == [newer]
    assert await theirs.lookup(MODEL) == [newer]


async def test_peer_that_restarts_with_a_shorter_period_is_seen_at_once(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    """A DHT keeps the record that expires later, so the new one has to go on from the old one."""

    def make_announcer(directory: Directory, lifetime_seconds: float) -> Announcer:
        def describe(state: PeerState, sequence: int, now: float) -> Announcement:
            return announce(
                clock, state=state, sequence=sequence, expires_at=now + lifetime_seconds
            )

        return Announcer(directory, identity_of(1), describe, clock, 1.0)

    await make_announcer(ours, 300.0).announce(PeerState.OFFLINE)
    clock.seconds += 1

    restarted = make_announcer(theirs, 3.0)
    for state in (PeerState.JOINING, PeerState.ONLINE):
        await restarted.announce(state)
        assert [a.state for a in await ours.lookup(MODEL)] == [state]
        assert [a.state for a in await theirs.lookup(MODEL)] == [state]


async def test_announcement_vanishes_when_it_expires(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    await ours.announce(sign(announce(clock)))

    clock.seconds += 89.9
    assert len(await theirs.lookup(MODEL)) == 1
    clock.seconds += 0.2
    assert await theirs.lookup(MODEL) == []
    assert await ours.lookup(MODEL) == []


async def test_models_are_separate(ours: Directory, theirs: Directory, clock: ManualClock) -> None:
    one, other = announce(clock), announce(clock, model_id=OTHER_MODEL)

    await ours.announce(sign(one))
    await ours.announce(sign(other))

    assert await theirs.lookup(MODEL) == [one]
    assert await theirs.lookup(OTHER_MODEL) == [other]


async def test_peer_that_left_is_visible_as_offline(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    for sequence, state in enumerate(PeerState, start=1):
        clock.seconds += 0.01
        await ours.announce(sign(announce(clock, sequence=sequence, state=state)))
        assert [a.state for a in await theirs.lookup(MODEL)] == [state]

    assert [a.state for a in await theirs.lookup(MODEL)] == [PeerState.OFFLINE]


async def test_record_that_does_not_hold_is_our_own_fault_and_not_published(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    record = sign(announce(clock))
    expired = sign(announce(clock, 2, issued_at=clock.wall() - 90, expires_at=clock.wall()), 2)

    for bad in (record[:-1], b"", record[:-1] + b"x", expired):
        with pytest.raises(LocalProtocolError):
            await ours.announce(bad)

    assert await ours.lookup(MODEL) == []
    assert await theirs.lookup(MODEL) == []


async def test_closed_directory_refuses_and_closes_twice(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    announcement = announce(clock)
    await ours.announce(sign(announcement))

    await ours.close()
    await ours.close()

    with pytest.raises(DirectoryError, match="closed"):
        await ours.lookup(MODEL)
    with pytest.raises(DirectoryError, match="closed"):
        await ours.announce(sign(announcement))
    assert await theirs.lookup(MODEL) == [announcement]


async def test_memory_directory_can_be_cut_off(clock: ManualClock) -> None:
    store = MemoryDirectoryStore()
    directory = MemoryDirectory(store, clock)
    announcement = announce(clock)
    await directory.announce(sign(announcement))

    store.is_reachable = False
    with pytest.raises(DirectoryError, match="cannot be reached"):
        await directory.lookup(MODEL)

    store.is_reachable = True
    assert await directory.lookup(MODEL) == [announcement]


# ---- what is known without asking


def list_known(directory: Directory, clock: ManualClock) -> list[KnownRecord]:
    return directory.records.list_records(MODEL, clock.wall())


async def test_member_takes_what_another_one_knows(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    first, second = announce(clock, 1), announce(clock, 2)
    await ours.announce(sign(first, 1))
    await theirs.announce(sign(second, 2))
    assert await ours.lookup(MODEL) != []

    values = [known.value for known in list_known(ours, clock)]

    assert theirs.records.take_all(MODEL, values, clock.wall()) == 2
    for directory in (ours, theirs):
        listed = {known.announcement for known in list_known(directory, clock)}
        assert listed == {first, second}
    assert ours.records.list_records(OTHER_MODEL, clock.wall()) == []


async def test_damaged_foreign_and_old_records_are_not_taken(
    ours: Directory, theirs: Directory, clock: ManualClock
) -> None:
    await ours.announce(sign(announce(clock)))
    (old,) = list_known(ours, clock)
    clock.seconds += 1
    newer = announce(clock, sequence=2)
    await ours.announce(sign(newer))
    (known,) = list_known(ours, clock)
    theirs.records.take(MODEL, known.value, clock.wall())
    damaged = known.value[:-1] + bytes([known.value[-1] ^ 1])

    for refused in (b"", b"\x02", damaged, old.value, known.value + b"\0"):
        with pytest.raises(RemoteProtocolError):
            theirs.records.take(MODEL, refused, clock.wall())

    with pytest.raises(RemoteProtocolError, match="another model"):
        theirs.records.take(OTHER_MODEL, known.value, clock.wall())
    assert [one.announcement for one in list_known(theirs, clock)] == [newer]
    assert theirs.records.list_records(OTHER_MODEL, clock.wall()) == []


async def test_expired_announcement_is_only_a_hint(ours: Directory, clock: ManualClock) -> None:
    peer = announce(clock)
    await ours.announce(sign(peer))
    assert ours.records.list_hints(MODEL, clock.wall()) == []
    (known,) = list_known(ours, clock)

    clock.seconds = peer.expires_at

    assert list_known(ours, clock) == []
    assert ours.records.list_hints(MODEL, clock.wall()) == [peer]
    with pytest.raises(RemoteProtocolError, match="expired"):
        ours.records.take(MODEL, known.value, clock.wall())
