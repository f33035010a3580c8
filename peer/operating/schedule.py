"""When a peer serves: at which hours of the day, and whether on battery.

The policy is `Schedule.list_reasons`, which is pure; the rest reads clocks and batteries.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.net.clock import Clock
from ..process.pauses import ServingPauses

_HOURS = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)", re.ASCII)

_MINUTES_PER_DAY = 24 * 60

_LOOK_SECONDS = 10.0
"""How late, at most, a pause begins and ends."""

POWER_SUPPLIES = Path("/sys/class/power_supply")
"""Where Linux tells of batteries and mains."""


@dataclass(frozen=True)
class Hours:
    """A part of each day, by the clock on the wall: minutes [start, stop), maybe over midnight."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Read `22:00-07:00`; 24:00 is the end of a day. Raises UsageError for anything else.

        >>> Hours.parse("22:00-07:00")
        Hours(start=1320, stop=420)
        """
        found = _HOURS.fullmatch(text)
        numbers = [int(digits) for digits in found.groups()] if found else []
        start, stop = (
            (60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]) if found else (0, 0)
        )
        minutes = numbers[1::2]
        if start == stop or max(start, stop) > _MINUTES_PER_DAY or max(minutes) >= 60:
            raise UsageError(f"hours are given as 22:00-07:00, not {text!r}")
        return cls(start % _MINUTES_PER_DAY, stop)

    def __str__(self) -> str:
        times = (f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.stop))
        return "-".join(times)

    def covers(self, minute: int) -> bool:
        """Return whether a minute of the day lies within.

        >>> night = Hours.parse("22:00-07:00")
        >>> night.covers(0), night.covers(6 * 60 + 59), night.covers(7 * 60)
        (True, True, False)
        """
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop


@dataclass(frozen=True)
class Schedule:
    """When a peer may serve."""

    hours: Sequence[Hours] = ()
    """Any of them will do; without any, it serves all day."""

    pauses_on_battery: bool = False
    """Whether to pause while the machine has no other power."""

    def list_reasons(self, minute: int, is_on_battery: bool) -> list[str]:
        """Return why the peer pauses at a minute of the day; nothing where it serves.

        >>> Schedule((Hours.parse("22:00-07:00"),)).list_reasons(12 * 60, False)
        ['outside of its hours, 22:00-07:00']
        """
        reasons: list[str] = []
        if self.hours and not any(hours.covers(minute) for hours in self.hours):
            reasons.append(f"outside of its hours, {', '.join(map(str, self.hours))}")
        if self.pauses_on_battery and is_on_battery:
            reasons.append("on battery")
        return reasons


async def follow_schedule(schedule: Schedule, pauses: ServingPauses, clock: Clock) -> None:
    """Pause a peer and have it go on, as its schedule says, until cancelled."""
    while True:
        minute = find_minute(clock.wall())
        reasons = schedule.list_reasons(minute, schedule.pauses_on_battery and is_on_battery())
        pauses.note("schedule", "; ".join(reasons) or None)
        await asyncio.sleep(_LOOK_SECONDS)


def find_minute(wall_seconds: float) -> int:
    """Return the minute of the day, in the local time zone, of seconds since the Unix epoch."""
    local = time.localtime(wall_seconds)
    return 60 * local.tm_hour + local.tm_min


def is_on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """Return whether this machine runs on a battery: one discharges, and no mains are online."""

    def read(file: Path) -> str:
        with suppress(OSError):
            return file.read_text().strip()
        return ""

    found = sorted(supplies.glob("*"))
    has_mains = any(read(one / "online") == "1" for one in found if read(one / "type") != "Battery")
    return not has_mains and any(
        read(one / "type") == "Battery"
        and read(one / "scope") != "Device"  # of a mouse
        and read(one / "status") == "Discharging"
        for one in found
    )
