"""Passes that wait for the compute thread, those that it is at, and whom they let in."""

import asyncio
import logging
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from .scheduler import Take, Usage, WaitingStep, choose_next, renew_usage

_logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""Passes that are begun and not over. Each costs half as much as the one before it, at most: so
all of them together take about the time of two like the first. Of memory that says nothing."""

_SMOOTHING = 0.3

GiveWay = Callable[[], None]
"""What a pass calls every few milliseconds, so that tokens and prompts do not wait for its end."""


class Guest(Enum):
    """What is computed while a pass stands still."""

    TOKENS = auto()
    PROMPTS = auto()
    """Perhaps with tokens."""
    PASS = auto()
    """A shorter one of another holder, as a whole."""


_OWN_TIME = {Guest.TOKENS: 0.25, Guest.PROMPTS: 1.0, Guest.PASS: 1.0}
"""How much time a pass has for itself, for each second that a guest took, before the next one of
its kind. Somebody waits for each token, so those get four fifths of the time if they need it."""

LetIn = Callable[[Collection[Guest]], Guest | None]
"""Computes a guest of one of these kinds; returns which it was, or None where there is none."""


class PassDroppedError(Exception):
    """Nobody waits for the pass any more."""


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """What a pass led to, and how long it waited, also for others meanwhile, and computed."""

    result: Any
    queue_seconds: float
    compute_seconds: float


@dataclass(eq=False, slots=True)
class PassJob:
    """A pass and what becomes of it. `cost` is what it takes, in tokens through a block forward."""

    run: Callable[[GiveWay], Any]
    cost: int
    holder: tuple[str, str]
    future: asyncio.Future[ComputedPass]
    released: asyncio.Future[None]
    """Done when nothing on the thread holds on to it, however it ended."""
    submitted_at: float
    num_bytes: int = 0
    """The most memory that computing it takes."""


class PassQueue:
    """Runs passes one after the other, and lets others compute in between.

    Holders take turns like those of sessions. A long pass does not hold up the short ones of other
    holders: they are guests in its middle, up to half as long as it, if their memory
    and its own are no more than `max_bytes`.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.max_bytes = 0
        self._now = now
        self._jobs: list[PassJob] = []
        self._turns: list[_Turn] = []  # each but the first is a guest of the one before
        self._usage: Usage = {}
        self._cost_seconds = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def queue_seconds(self) -> float:
        """Estimate how long a pass of one more holder would wait; 0 until one was computed."""
        heads: dict[tuple[str, str], int] = {}
        for job in self._jobs:
            heads.setdefault(job.holder, job.cost)
        running = sum(turn.estimate_rest(self._cost_seconds) for turn in tuple(self._turns))
        return running + self._cost_seconds * sum(heads.values())

    def append(self, job: PassJob) -> None:
        """Queue a pass."""
        self._jobs.append(job)

    def take_all(self) -> list[PassJob]:
        """Return what waits, which nobody will compute."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def take_cancelled(self) -> list[PassJob]:
        """Take those out of the queue for which nobody waits any more."""
        cancelled = [job for job in self._jobs if job.future.cancelled()]
        self._jobs = [job for job in self._jobs if not job.future.cancelled()]
        return cancelled

    def choose(self) -> PassJob | None:
        """Take the pass whose turn it is out of the queue; None where none waits.

        While one runs, only a guest of it is chosen.
        """
        waiting = [
            WaitingStep(id(job), job.holder, 1, job.cost, is_decoding=False) for job in self._jobs
        ]
        ready = [place for place, job in enumerate(self._jobs) if self._may_begin(job)]
        index = choose_next([waiting[place] for place in ready], self._usage)
        if index is None:
            return None
        place = ready[index]
        self._usage = renew_usage(self._usage, waiting, [Take(place, waiting[place].num_tokens)])
        return self._jobs.pop(place)

    def _may_begin(self, job: PassJob) -> bool:
        if job.future.cancelled():
            return False
        if not self._turns:
            return True
        is_short = 2 * job.cost <= self._turns[-1].job.cost and len(self._turns) < _MOST_AT_ONCE
        num_bytes = job.num_bytes + sum(turn.job.num_bytes for turn in self._turns)
        if num_bytes > self.max_bytes:
            return False
        return is_short and all(job.holder != turn.job.holder for turn in self._turns)

    def run(self, job: PassJob, let_in: LetIn) -> ComputedPass | ShoalError | None:
        """Run a pass to its end; None if nobody waits for it any more."""
        turn = _Turn(job, self._now, let_in)
        self._turns.append(turn)
        try:
            computed = turn.conclude(job.run(turn.give_way))
        except PassDroppedError:
            return None
        except ShoalError as error:
            return copy(error)  # without its frames, and the tensors in them
        except Exception:
            _logger.exception("a pass failed")
            return RefusedError(ErrorCode.INTERNAL, "the peer failed to compute the pass")
        finally:
            self._turns.pop()
        shown = computed.compute_seconds / job.cost
        known = self._cost_seconds or shown
        self._cost_seconds = known + _SMOOTHING * (shown - known)
        return computed


class _Turn:
    """One pass while it runs, and the times at which others interrupt it."""

    def __init__(self, job: PassJob, now: Callable[[], float], let_in: LetIn) -> None:
        self.job = job
        self._now = now
        self._let_in = let_in
        self._began_at = now()
        self._owed_until = dict.fromkeys(Guest, self._began_at)
        self._interrupted_seconds = 0.0

    def give_way(self) -> None:
        """Let somebody in whose turn it is."""
        if self.job.future.cancelled():
            raise PassDroppedError
        now = self._now()
        guest = self._let_in([kind for kind, until in self._owed_until.items() if now >= until])
        if guest is None:
            return
        resumed_at = self._now()
        seconds = resumed_at - now
        self._interrupted_seconds += seconds
        for kind in Guest:
            self._owed_until[kind] += seconds  # it had nothing of these
        self._owed_until[guest] = resumed_at + _OWN_TIME[guest] * seconds

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
