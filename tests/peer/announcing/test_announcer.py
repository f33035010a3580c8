"""The announcer on virtual time, against a directory in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from async_tests import Story, make_decorator
from virtual_time import VirtualClock

from shoal.peer.announcing.announcer import LIFETIME_PERIODS, Announcer
from shoal.protocol import limits
from shoal.protocol.errors import DirectoryError, RevokedError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span

IDENTITY = Identity(bytes(32))
MODEL_ID = ModelId("a" * 32)
PERIOD_SECONDS = 30.0
WAY_SECONDS = 0.5
"""How long a record takes to the directory, or a failure to be noticed."""


class FlakyDirectory(MemoryDirectory):
    """Takes its time, and loses some announcements."""

    def __init__(self, store: MemoryDirectoryStore) -> None:
        super().__init__(store, VirtualClock())
        self.way_seconds = WAY_SECONDS
        self.num_losses = 0
        self.num_lookups = 0
        self.lookup_seconds = 0.0

    async def announce(self, record: bytes) -> None:
        await asyncio.sleep(self.way_seconds)
        if self.num_losses:
            self.num_losses -= 1
            raise DirectoryError("lost on the way")
        await super().announce(record)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        self.num_lookups += 1
        await asyncio.sleep(self.lookup_seconds)
        return await super().lookup(model_id)


class Scene:
    """A directory, and announcers that come and go."""

    def __init__(self) -> None:
        self.store = MemoryDirectoryStore()
        self.directory = FlakyDirectory(self.store)

    def make_announcer(self, period_seconds: float = PERIOD_SECONDS) -> Announcer:
        def describe(state: PeerState, sequence: int, now: float) -> Announcement:
            lifetime_seconds = LIFETIME_PERIODS * period_seconds
            return make_announcement(state, sequence, now, lifetime_seconds)

        return Announcer(self.directory, IDENTITY, describe, VirtualClock(), period_seconds)

    @asynccontextmanager
    async def renewing(self, period_seconds: float = PERIOD_SECONDS) -> AsyncGenerator[Announcer]:
        """An announcer whose `run` is under way."""
        announcer = self.make_announcer(period_seconds)
        await announcer.announce(PeerState.ONLINE)
        renewing = asyncio.create_task(announcer.run())
        try:
            yield announcer
            assert not renewing.done()
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])

    async def look_up(self) -> Announcement:
        (announcement,) = await self.directory.lookup(MODEL_ID)
        return announcement


def make_announcement(
    state: PeerState, sequence: int, now: float, lifetime_seconds: float
) -> Announcement:
    return Announcement(
        peer_id=IDENTITY.peer_id,
        model_id=MODEL_ID,
        num_blocks=4,
        span=Span(0, 4),
        state=state,
        endpoints=(),
        min_version=1,
        max_version=1,
        weights="fp32",
        compute_dtype="fp32",
        sequence=sequence,
        issued_at=now,
        expires_at=now + lifetime_seconds,
    )


async def run(story: Story) -> None:
    await story(Scene())
    assert asyncio.all_tasks() == {asyncio.current_task()}


in_scene = make_decorator(run)


async def expect_known(scene: Scene, num_seconds: int) -> list[Announcement]:
    """Look every second whether the peer can be found; return what was."""
    seen: list[Announcement] = []
    for _ in range(num_seconds):
        await asyncio.sleep(1.0)
        seen.append(await scene.look_up())
    return seen


@in_scene()
async def test_renewals_come_long_before_expiry_and_sequence_and_expiry_grow(scene: Scene) -> None:
    async with scene.renewing():
        seen: list[Announcement] = []
        for _ in range(600):
            seen += await expect_known(scene, 1)
            assert seen[-1].expires_at - VirtualClock().wall() > 1.9 * PERIOD_SECONDS
    announcements = sorted(set(seen), key=lambda announcement: announcement.sequence)
    assert len(announcements) >= 600 / (PERIOD_SECONDS + 1)
    assert list(dict.fromkeys(seen)) == announcements
    expiries = [announcement.expires_at for announcement in announcements]
    assert expiries == sorted(set(expiries))


@in_scene()
async def test_sequence_goes_on_after_a_restart(scene: Scene) -> None:
    last = 0
    for _ in range(3):
        async with scene.renewing():
            await asyncio.sleep(5 * PERIOD_SECONDS)
        sequence = (await scene.look_up()).sequence
        assert sequence > last
        last = sequence

    await scene.make_announcer().announce(PeerState.JOINING)
    announcement = await scene.look_up()
    assert announcement.state is PeerState.JOINING
    assert announcement.sequence > last


@in_scene()
async def test_restart_with_a_shorter_period_is_taken_at_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    async with scene.renewing(limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS / LIFETIME_PERIODS):
        before = await scene.look_up()
    await asyncio.sleep(1.0)

    async with scene.renewing(period_seconds=2.0) as announcer:
        restarted = await scene.look_up()
        assert restarted.expires_at > before.expires_at
        await asyncio.sleep(10.0)
        await announcer.announce(PeerState.DRAINING)
        assert (await scene.look_up()).state is PeerState.DRAINING
        await asyncio.sleep(before.expires_at - clock.wall())
        announcement = await scene.look_up()
        lifetime_seconds = announcement.expires_at - announcement.issued_at
        assert lifetime_seconds == pytest.approx(2.0 * LIFETIME_PERIODS, abs=1.0)

    assert not caplog.records


@in_scene()
async def test_sequence_goes_on_though_the_clock_was_set_back(scene: Scene) -> None:
    now = VirtualClock().wall()
    before = make_announcement(PeerState.ONLINE, int((now + 3600) * 1000), now, 90.0)
    await scene.directory.announce(sign_announcement(IDENTITY, before))

    await scene.make_announcer().announce(PeerState.JOINING)

    announcement = await scene.look_up()
    assert announcement.state is PeerState.JOINING
    assert announcement.sequence == before.sequence + 1


@in_scene()
async def test_earlier_announcement_is_continued_as_soon_as_limits_allow(scene: Scene) -> None:
    """Its date may lie ahead by as much as clocks may differ."""

    now = VirtualClock().wall() + limits.MAX_CLOCK_SKEW_SECONDS
    longest_seconds = limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS
    before = make_announcement(PeerState.ONLINE, 1, now, longest_seconds)
    await scene.directory.announce(sign_announcement(IDENTITY, before))
    announcer = scene.make_announcer()

    with pytest.raises(DirectoryError):
        await announcer.announce(PeerState.JOINING)
    await asyncio.sleep(limits.MAX_CLOCK_SKEW_SECONDS)
    await announcer.announce(PeerState.JOINING)

    assert (await scene.look_up()).state is PeerState.JOINING


@in_scene()
async def test_announcements_of_others_do_not_matter_at_the_start(scene: Scene) -> None:
    other = Identity(b"o" * 32)
    theirs = replace(
        make_announcement(PeerState.ONLINE, 2**50, VirtualClock().wall(), 600.0),
        peer_id=other.peer_id,
    )
    await scene.directory.announce(sign_announcement(other, theirs))

    await scene.make_announcer().announce(PeerState.ONLINE)

    ours = next(a for a in await scene.directory.lookup(MODEL_ID) if a != theirs)
    assert ours.sequence < 2**50
    assert ours.expires_at - ours.issued_at == LIFETIME_PERIODS * PERIOD_SECONDS


@in_scene()
async def test_announcement_is_fresh_however_long_reading_back_took(scene: Scene) -> None:
    scene.directory.lookup_seconds = 2 * LIFETIME_PERIODS * PERIOD_SECONDS
    await scene.make_announcer().announce(PeerState.ONLINE)

    scene.directory.lookup_seconds = 0.0
    assert VirtualClock().wall() - (await scene.look_up()).issued_at == WAY_SECONDS


@in_scene()
async def test_own_announcement_is_read_back_only_once(scene: Scene) -> None:
    async with scene.renewing():
        await asyncio.sleep(20 * PERIOD_SECONDS)
    assert scene.directory.num_lookups == 1


@in_scene()
async def test_change_of_state_is_announced_at_once_and_kept(scene: Scene) -> None:
    async with scene.renewing() as announcer:
        await asyncio.sleep(PERIOD_SECONDS / 2)
        await announcer.announce(PeerState.DRAINING)
        assert (await scene.look_up()).state is PeerState.DRAINING
        seen = await expect_known(scene, 200)
    assert {announcement.state for announcement in seen} == {PeerState.DRAINING}


@in_scene()
async def test_renewal_under_way_does_not_come_out_behind_a_newer_state(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene.renewing() as announcer:
        scene.directory.way_seconds = 5.0
        await asyncio.sleep(PERIOD_SECONDS + 1)  # the renewal is on its way
        scene.directory.way_seconds = WAY_SECONDS
        await announcer.announce(PeerState.OFFLINE)
        assert (await scene.look_up()).state is PeerState.OFFLINE
        seen = await expect_known(scene, 100)
    assert {announcement.state for announcement in seen} == {PeerState.OFFLINE}

    assert not caplog.records, "no renewal came too late for the directory to take it"


@in_scene()
async def test_state_that_could_not_be_announced_is_made_up_for(scene: Scene) -> None:
    async with scene.renewing() as announcer:
        scene.store.is_reachable = False
        with pytest.raises(DirectoryError):
            await announcer.announce(PeerState.DRAINING)
        scene.store.is_reachable = True
        await asyncio.sleep(PERIOD_SECONDS + 1)
        assert (await scene.look_up()).state is PeerState.DRAINING


@in_scene()
async def test_announcement_outlives_two_that_were_lost(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene.renewing():
        scene.directory.num_losses = 2
        await expect_known(scene, 300)

    (record,) = caplog.records
    assert "lost on the way" in record.getMessage()
    assert scene.directory.num_lookups == 300 + 2, "what others said meanwhile is read"


@in_scene()
async def test_renewals_come_once_a_period_also_after_a_loss(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene.renewing():
        scene.directory.num_losses = 1
        seen = await expect_known(scene, int(20 * PERIOD_SECONDS))
    assert 18 <= len(set(seen)) <= 20
    assert not caplog.records, "a single loss is no news"


@in_scene()
async def test_renewal_that_was_cancelled_does_not_stand_in_the_way(scene: Scene) -> None:
    """A peer cancels it when it leaves, and says goodbye through the same announcer."""

    announcer = scene.make_announcer()
    await announcer.announce(PeerState.ONLINE)
    scene.directory.way_seconds = 5.0
    renewing = asyncio.create_task(announcer.announce(PeerState.ONLINE))
    await asyncio.sleep(1.0)
    renewing.cancel()
    scene.directory.way_seconds = WAY_SECONDS

    await announcer.announce(PeerState.OFFLINE)

    assert (await scene.look_up()).state is PeerState.OFFLINE


@in_scene()
async def test_sequence_starts_at_the_time_whatever_is_found(scene: Scene) -> None:
    """An earlier announcement may still be somewhere, though reading back did not find it."""

    await scene.make_announcer().announce(PeerState.ONLINE)

    assert (await scene.look_up()).sequence >= VirtualClock().wall() * 1000 - 1000


@in_scene()
async def test_peer_that_was_revoked_ends_and_says_no_goodbye(scene: Scene) -> None:
    class RevokingDirectory(FlakyDirectory):
        is_revoked = False

        async def announce(self, record: bytes) -> None:
            if self.is_revoked:
                raise RevokedError("the owner has revoked this peer")
            await super().announce(record)

    scene.directory = directory = RevokingDirectory(scene.store)
    announcer = scene.make_announcer()
    await announcer.announce(PeerState.ONLINE)
    directory.is_revoked = True

    with pytest.raises(RevokedError):
        await announcer.run()

    assert announcer.state is PeerState.OFFLINE


@in_scene()
async def test_error_that_is_not_the_directorys_ends_the_renewal(scene: Scene) -> None:
    """A bug of ours must reach the owner of the task, not vanish in a warning."""

    def describe(*_: object) -> Announcement:
        raise ZeroDivisionError("on purpose")

    announcer = Announcer(scene.directory, IDENTITY, describe, VirtualClock(), PERIOD_SECONDS)
    with pytest.raises(ZeroDivisionError):
        await announcer.run()
