"""When a peer serves: by hours, batteries, other programs at work, and the bytes that it may move.

The policy is `Schedule.list_reasons` and `Meter`, which are pure; the rest reads clocks, batteries
and counters.
"""

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Sequence
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

_AVERAGED_SECONDS = 60.0
"""Over which uses are averaged before they count as more than a limit."""

_QUIET_SECONDS = 120.0
"""How long the machine must be idle, after much work, until the peer goes on."""

PROCESSOR_TIMES = Path("/proc/stat")
"""Where Linux tells what processors did since its start."""

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

    others_cores: float = 0.0
    """Pause while other programs of the machine keep more processor cores busy; 0: never."""

    upload: int = 0
    """Most bytes a second that are sent, on average; over that the peer pauses. 0: no limit."""

    download: int = 0
    """The same for bytes that are received."""

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


class Meter:
    """Tells whether more is used than a limit allows, averaged over a minute.

    A bucket that leaks at the rate of the limit: full means over the limit, until it is empty.

    >>> meter = Meter()
    >>> used = (0, 0), (700, 10), (700, 75), (1400, 80), (1400, 140), (1400, 145)
    >>> [meter.take(total, now, limit=10.0) for total, now in used]
    [False, False, False, True, True, False]
    """

    def __init__(self, most_seconds: float = math.inf) -> None:
        """`most_seconds` is how long, at most, nothing may be used before it is below again."""
        self._most_seconds = most_seconds
        self._last: tuple[float, float] | None = None
        self._limit = 0.0
        self._excess = 0.0
        self._is_over = False
        self.per_second = 0.0
        """Use between the last two readings."""

    def take(self, total: float, now: float, limit: float) -> bool:
        """Take what was used in total until now; return whether that is over the limit, if it is
        not 0. Another limit than before counts from now on.
        """
        used = seconds = 0.0
        if self._last is not None:
            used, seconds = max(0.0, total - self._last[0]), now - self._last[1]
        self._last = total, now
        self.per_second = used / seconds if seconds else 0.0
        is_counted = limit and limit == self._limit
        excess = max(0.0, self._excess + used - limit * seconds) if is_counted else 0.0
        self._excess = min(excess, limit * self._most_seconds) if excess else 0.0
        self._limit = limit
        if self._excess > limit * _AVERAGED_SECONDS:
            self._is_over = True
        elif not self._excess:
            self._is_over = False
        return self._is_over


class ScheduleFollower:
    """Pauses a peer and has it go on, as its schedule says while `run` does."""

    def __init__(
        self,
        schedule: Schedule,
        pauses: ServingPauses,
        clock: Clock,
        count_traffic: Callable[[], tuple[int, int]],
    ) -> None:
        """`count_traffic` returns the bytes sent and received so far."""
        self.schedule = schedule
        """What holds; may be replaced."""
        self._pauses = pauses
        self._clock = clock
        self._count_traffic = count_traffic
        self.upload, self.download = Meter(), Meter()
        self._others = Meter(_QUIET_SECONDS)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Pause the peer or have it go on, by what is so now."""
        schedule, now = self.schedule, self._clock.now()
        is_pausing = schedule.pauses_on_battery and is_on_battery()
        reasons = schedule.list_reasons(find_minute(self._clock.wall()), is_pausing)
        others_seconds = read_processor_seconds() - time.process_time()
        sent, received = self._count_traffic()
        for meter, total, limit, reason in (
            (
                self._others,
                others_seconds,
                schedule.others_cores,
                "other programs: over {:g} cores",
            ),
            (self.upload, sent, schedule.upload, "upload: over {:,} bytes a second"),
            (self.download, received, schedule.download, "download: over {:,} bytes a second"),
        ):
            if meter.take(total, now, limit):
                reasons.append(reason.format(limit))
        self._pauses.note("schedule", "; ".join(reasons) or None)


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


def read_processor_seconds(file: Path = PROCESSOR_TIMES) -> float:
    """Return how long the machine's cores have worked in all; 0 where the system does not say."""
    try:
        words = file.read_text().split(maxsplit=9)
        # user, nice, system, idle, waiting for disks, interrupts of two kinds; then other machines
        user, nice, system, _, _, interrupts, soft_interrupts = map(int, words[1:8])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")
