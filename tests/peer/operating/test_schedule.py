"""When a peer serves, by its hours and on battery."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hand_clock import HandClock

from shoal.peer.operating.schedule import (
    Hours,
    Schedule,
    find_minute,
    follow_schedule,
    is_on_battery,
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
    following = asyncio.create_task(follow_schedule(Schedule((Hours.parse(text),)), pauses, clock))

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
