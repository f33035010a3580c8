"""When a peer serves: by its hours, on battery, and by what it and other programs use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hand_clock import HandClock

from shoal.peer.operating.schedule import (
    Hours,
    Meter,
    Schedule,
    ScheduleFollower,
    find_minute,
    is_on_battery,
    read_processor_seconds,
)
from shoal.peer.process.pauses import ServingPauses
from shoal.protocol.errors import UsageError


def minute(text: str) -> int:
    hour, _, minutes = text.partition(":")
    return 60 * int(hour) + int(minutes)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("09:00-17:30", ["9:00", "17:29"], ["8:59", "17:30", "0:00"]),
        ("22:00-07:00", ["22:00", "23:59", "0:00", "6:59"], ["7:00", "21:59"]),
        ("0:00-24:00", ["0:00", "23:59"], []),
        ("18:00-24:00", ["18:00", "23:59"], ["0:00", "17:59"]),
    ],
)
def test_hours_are_half_open_and_may_span_midnight(
    hours: str, inside: list[str], outside: list[str]
) -> None:
    schedule = Schedule((Hours.parse(hours),))

    assert not [time for time in inside if schedule.list_reasons(minute(time), False)]
    assert not [time for time in outside if not schedule.list_reasons(minute(time), False)]


@pytest.mark.parametrize("text", ["", "9-17", "22:00", "25:00-26:00", "9:60-10:00", "7:00-7:00"])
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="hours are given as 22:00-07:00"):
        Hours.parse(text)


def test_peer_serves_in_any_of_its_hours_and_pauses_on_battery_only_if_asked() -> None:
    hours = (Hours.parse("9:00-12:00"), Hours.parse("22:00-07:00"))

    assert not Schedule().list_reasons(0, is_on_battery=True)
    assert not Schedule(hours).list_reasons(minute("10:00"), is_on_battery=True)
    assert not Schedule(hours).list_reasons(minute("23:00"), is_on_battery=True)
    assert Schedule(hours, pauses_on_battery=True).list_reasons(minute("15:00"), True) == [
        "outside of its hours, 09:00-12:00, 22:00-07:00",
        "on battery",
    ]


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}}, False),
        (
            {
                "BAT0": {"type": "Battery", "status": "Discharging"},
                "AC": {"type": "Mains", "online": "1"},
            },
            False,
        ),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
    ],
)
def test_battery_counts_where_it_is_all_the_power(
    supplies: dict[str, dict[str, str]], expected: bool, tmp_path: Path
) -> None:
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(f"{content}\n")

    assert is_on_battery(tmp_path) is expected


async def test_pause_begins_and_ends_with_the_hours() -> None:
    clock = HandClock()
    now = find_minute(clock.wall())
    later = (now + 60) % (24 * 60)
    text = f"{later // 60}:{later % 60:02}-{(later // 60 + 1) % 24}:{later % 60:02}"
    pauses = ServingPauses()
    follower = ScheduleFollower(Schedule((Hours.parse(text),)), pauses, clock, lambda: (0, 0))
    following = asyncio.create_task(follower.run())

    await asyncio.wait_for(pauses.wanted.wait(), 60)
    pauses.note("owner", "drained by its owner")
    clock.seconds += 3600
    while len(pauses.reasons) > 1:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(1)
    assert pauses.reasons == ("drained by its owner",)
    pauses.note("owner", None)
    assert pauses.unwanted.is_set()
    assert not pauses.wanted.is_set()

    following.cancel()


def test_peer_that_moves_more_than_its_owner_allows_pauses_until_the_average_fits() -> None:
    clock, pauses = HandClock(), ServingPauses()
    sent, received = 0, 0
    follower = ScheduleFollower(Schedule(upload=1000), pauses, clock, lambda: (sent, received))
    reasons = list[tuple[str, ...]]()

    follower.look()
    for more in (50_000, 50_000, 0, 0, 0, 0, 0, 0, 0):
        sent, received, clock.seconds = sent + more, received + 10**9, clock.seconds + 10
        follower.look()
        reasons.append(pauses.reasons)

    over = ("upload: over 1,000 bytes a second",)
    assert reasons == [(), over, over, over, over, over, over, over, over]
    clock.seconds += 10
    follower.look()
    assert pauses.reasons == ()
    follower.schedule = Schedule(download=1000)
    follower.look()
    received, clock.seconds = received + 70_001, clock.seconds + 10
    follower.look()
    assert pauses.reasons == ("download: over 1,000 bytes a second",)
    follower.schedule = Schedule()
    follower.look()
    assert pauses.reasons == ()


def test_other_limit_counts_from_its_change_on() -> None:
    meter = Meter()
    fast = [meter.take(5e6 * now, now, 1e6) for now in (0.0, 10.0, 20.0)]
    slow = [meter.take(15e7 + 500.0 * (now - 30.0), now, 1000.0) for now in (30.0, 40.0, 600.0)]

    assert fast == [False, False, True]
    assert slow == [False, False, False]


def test_peer_makes_room_for_other_programs_soon_and_comes_back_when_they_are_quiet() -> None:
    meter, total = Meter(most_seconds=120.0), 0.0
    over = list[bool]()

    for second in range(0, 900, 10):
        total += 40.0 if 100 <= second < 600 else 1.0  # four cores for minutes, else a tenth of one
        over.append(meter.take(total, float(second), 0.5))

    assert over[:10] == [False] * 10
    assert over[11:60] == [True] * 49
    assert over.index(False, 60) == 60 + 14


def test_work_of_all_programs_is_read(tmp_path: Path) -> None:
    file = tmp_path / "stat"
    file.write_text("cpu  100 20 30 9999 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")

    assert read_processor_seconds(file) == pytest.approx(163 / 100, abs=0.01)
    assert read_processor_seconds(tmp_path / "none") == 0.0
    file.write_text("cpu  100 20")
    assert read_processor_seconds(file) == 0.0
