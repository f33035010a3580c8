"""Passes that wait for the compute thread, those that it runs, and what may interrupt them."""

import asyncio
import logging
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ...kernels.pauses import GiveWay
from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from .scheduler import ScheduledPart, Usage, WaitingStep, choose_next, renew_usage

_logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""Passes that run inside each other. Each costs at most half as much as the one before it: together
they take about twice the time of the first. Their memory is limited by `max_bytes`."""

_SMOOTHING = 0.3


class Interruption(Enum):
    """Work that is computed in the middle of a pass."""

    TOKENS = auto()
    PROMPTS = auto()
    """Prompts, perhaps with tokens."""
    PASS = auto()
    """A shorter pass of another tenant, as a whole."""


_OWN_TIME = {Interruption.TOKENS: 0.25, Interruption.PROMPTS: 1.0, Interruption.PASS: 1.0}
"""How long a pass computes after an interruption before the next one of its kind, for each second
that this one took. Users wait for tokens, so these get four fifths of the time if needed."""

RunInterruption = Callable[[Collection[Interruption]], Interruption | None]
"""Computes an interruption of one of these kinds; returns its kind, or None if none waits."""


class PassDroppedError(Exception):
    """The pass was cancelled."""


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """The result of a pass, and how long it waited, interruptions included, and computed."""

    result: Any
    queue_seconds: float
    compute_seconds: float


@dataclass(eq=False, slots=True)
class PassJob:
    """A pass and its future. `cost` is in tokens that go forward through one block."""

    run: Callable[[GiveWay], Any]
    cost: int
    tenant: tuple[str, str]
    future: asyncio.Future[ComputedPass]
    released: asyncio.Future[None]
    """Done when the thread holds no reference to the pass, however it ended."""
    submitted_at: float
    num_bytes: int = 0
    """The most memory that computing it takes."""


class PassQueue:
    """Runs passes one after the other, and interrupts them for other work.

    Tenants take turns like those of sessions. A long pass does not delay short ones of other
    tenants: these interrupt it if they are at most half as long, and if all of them together take
    no more memory than `max_bytes`.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.max_bytes = 0
        self._now = now
        self.jobs: list[PassJob] = []
        """Those that wait."""
        self.running: list[_RunningPass] = []
        """Those that were begun; each but the first interrupts the one before."""
        self._usage: Usage = {}
        self._cost_seconds = 0.0

    @property
    def queue_seconds(self) -> float:
        """Estimate how long a pass of one more tenant would wait; 0 until one was computed."""
        heads: dict[tuple[str, str], int] = {}
        for job in self.jobs:
            heads.setdefault(job.tenant, job.cost)
        running = sum(one.estimate_rest(self._cost_seconds) for one in tuple(self.running))
        return running + self._cost_seconds * sum(heads.values())

    def append(self, job: PassJob) -> None:
        """Queue a pass."""
        self.jobs.append(job)

    def take_all(self) -> list[PassJob]:
        """Return the waiting passes, which will not be computed."""
        jobs, self.jobs = self.jobs, []
        return jobs

    def take_cancelled(self) -> list[PassJob]:
        """Take cancelled passes out of the queue."""
        cancelled = [job for job in self.jobs if job.future.cancelled()]
        self.jobs = [job for job in self.jobs if not job.future.cancelled()]
        return cancelled

    def choose(self) -> PassJob | None:
        """Take the pass whose turn it is out of the queue; None if none waits.

        While a pass runs, only one that may interrupt it is chosen.
        """
        waiting = [
            WaitingStep(id(job), job.tenant, 1, job.cost, is_decoding=False) for job in self.jobs
        ]
        ready = [place for place, job in enumerate(self.jobs) if self._may_begin(job)]
        index = choose_next([waiting[place] for place in ready], self._usage)
        if index is None:
            return None
        place = ready[index]
        chosen = ScheduledPart(place, waiting[place].num_tokens)
        self._usage = renew_usage(self._usage, waiting, [chosen])
        return self.jobs.pop(place)

    def _may_begin(self, job: PassJob) -> bool:
        if job.future.cancelled():
            return False
        if not self.running:
            return True
        innermost = self.running[-1].job
        is_short = 2 * job.cost <= innermost.cost and len(self.running) < _MOST_AT_ONCE
        num_bytes = job.num_bytes + sum(one.job.num_bytes for one in self.running)
        if num_bytes > self.max_bytes:
            return False
        return is_short and all(job.tenant != one.job.tenant for one in self.running)

    def run(self, job: PassJob, interrupt: RunInterruption) -> ComputedPass | ShoalError | None:
        """Run a pass to its end; None if it was cancelled meanwhile."""
        running = _RunningPass(job, self._now, interrupt)
        self.running.append(running)
        try:
            computed = running.conclude(job.run(running.give_way))
        except PassDroppedError:
            return None
        except ShoalError as error:
            return copy(error)  # without its frames, and the tensors in them
        except Exception:
            _logger.exception("a pass failed and is refused")
            return RefusedError(ErrorCode.INTERNAL, "the peer failed to compute the pass")
        finally:
            self.running.pop()
        shown = computed.compute_seconds / job.cost
        known = self._cost_seconds or shown
        self._cost_seconds = known + _SMOOTHING * (shown - known)
        return computed


class _RunningPass:
    """A pass while it runs, and when each kind of work may interrupt it next."""

    def __init__(self, job: PassJob, now: Callable[[], float], interrupt: RunInterruption) -> None:
        self.job = job
        self._now = now
        self._interrupt = interrupt
        self._began_at = now()
        self._owed_until = dict.fromkeys(Interruption, self._began_at)
        self._interrupted_seconds = 0.0

    def give_way(self) -> None:
        """Run an interruption if the time for one of its kind has come."""
        if self.job.future.cancelled():
            raise PassDroppedError
        now = self._now()
        due = [kind for kind, until in self._owed_until.items() if now >= until]
        interruption = self._interrupt(due)
        if interruption is None:
            return
        resumed_at = self._now()
        seconds = resumed_at - now
        self._interrupted_seconds += seconds
        for kind in Interruption:
            self._owed_until[kind] += seconds  # meanwhile the pass had no time for itself
        self._owed_until[interruption] = resumed_at + _OWN_TIME[interruption] * seconds

    def conclude(self, result: Any) -> ComputedPass:
        """Return the result with the times that it took."""
        compute_seconds = self._count_own_seconds()
        total_seconds = self._now() - self.job.submitted_at
        return ComputedPass(result, total_seconds - compute_seconds, compute_seconds)

    def estimate_rest(self, cost_seconds: float) -> float:
        """Return how long the pass still computes, if each cost takes so many seconds."""
        return max(0.0, self.job.cost * cost_seconds - self._count_own_seconds())

    def _count_own_seconds(self) -> float:
        return self._now() - self._began_at - self._interrupted_seconds
