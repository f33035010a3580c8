"""Passes that wait for the compute thread, and the one that it is at."""

import asyncio
import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from .scheduler import Take, Usage, WaitingStep, choose_next, renew_usage

_logger = logging.getLogger(__name__)

GiveWay = Callable[[], None]
"""What a pass calls every few milliseconds, so that tokens and prompts do not wait for its end."""


class PassDroppedError(Exception):
    """Nobody waits for the pass any more."""


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """What a pass led to, and how long it waited, also for others meanwhile, and computed."""

    result: Any
    queue_seconds: float
    compute_seconds: float


@dataclass(slots=True)
class PassJob:
    """A pass that waits; `num_tokens` is what it counts for in the shares of its `holder`."""

    run: Callable[[GiveWay], Any]
    num_tokens: int
    holder: tuple[str, str]
    future: asyncio.Future[ComputedPass]
    submitted_at: float


class PassQueue:
    """Runs passes one at a time, and lets everybody else compute in between.

    Its holders take turns like those of sessions. After an interruption a pass has as much time as
    that took: so it gets half of the time at least, and so do the others.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._jobs: list[PassJob] = []
        self._usage: Usage = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def append(self, job: PassJob) -> None:
        """Queue a pass."""
        self._jobs.append(job)

    def take_all(self) -> list[PassJob]:
        """Return what waits, which nobody will compute."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def drop_cancelled(self) -> None:
        """Forget the passes for which nobody waits any more."""
        self._jobs = [job for job in self._jobs if not job.future.cancelled()]

    def choose(self) -> PassJob | None:
        """Take the pass whose turn it is out of the queue; None where none waits."""
        self.drop_cancelled()
        waiting = [
            WaitingStep(id(job), job.holder, 1, job.num_tokens, is_decoding=False)
            for job in self._jobs
        ]
        index = choose_next(waiting, self._usage)
        if index is None:
            return None
        self._usage = renew_usage(self._usage, waiting, [Take(index, waiting[index].num_tokens)])
        return self._jobs.pop(index)

    def run(
        self, job: PassJob, compute_others: Callable[[], bool]
    ) -> ComputedPass | ShoalError | None:
        """Run a pass to its end; None if nobody waits for it any more.

        `compute_others` returns whether there was something to compute.
        """
        turn = _Turn(job, self._now, compute_others)
        try:
            result = job.run(turn.give_way)
        except PassDroppedError:
            return None
        except ShoalError as error:
            return copy(error)  # without its frames, and the tensors in them
        except Exception:
            _logger.exception("a pass failed")
            return RefusedError(ErrorCode.INTERNAL, "the peer failed to compute the pass")
        return turn.conclude(result)


class _Turn:
    """One pass while it runs, and the times at which others interrupt it."""

    def __init__(
        self, job: PassJob, now: Callable[[], float], compute_others: Callable[[], bool]
    ) -> None:
        self._job = job
        self._now = now
        self._compute_others = compute_others
        self._began_at = self._resumed_at = now()
        self._owed_seconds = 0.0
        self._interrupted_seconds = 0.0

    def give_way(self) -> None:
        """Let others compute, unless it is the turn of this pass for a while."""
        if self._job.future.cancelled():
            raise PassDroppedError
        now = self._now()
        if now - self._resumed_at < self._owed_seconds or not self._compute_others():
            return
        self._resumed_at = self._now()
        self._owed_seconds = self._resumed_at - now
        self._interrupted_seconds += self._owed_seconds

    def conclude(self, result: Any) -> ComputedPass:
        """Return the result with the times that it took."""
        total_seconds = self._now() - self._job.submitted_at
        compute_seconds = self._now() - self._began_at - self._interrupted_seconds
        return ComputedPass(result, total_seconds - compute_seconds, compute_seconds)
