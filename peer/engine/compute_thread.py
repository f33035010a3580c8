"""The one thread that touches the device: its queue of steps, and how the event loop reaches it.

Each iteration computes the steps, and parts of prompts, that the policy in `scheduler` chooses.
Passes run in the time that is left, and are interrupted for steps.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ...kernels.pauses import GiveWay
from ...protocol.errors import ErrorCode, LocalProtocolError, RefusedError, ShoalError
from ...protocol.session.session_state import count_kept_tokens
from .engine import Engine
from .pass_queue import ComputedPass, Interruption, PassJob, PassQueue
from .scheduler import (
    IterationBudget,
    ScheduledPart,
    Usage,
    WaitingStep,
    choose_batch,
    choose_urgent,
    count_token_cost,
    renew_usage,
)
from .steps import ComputedStep, StepWork

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NICENESS = 4
"""More than that of event loops, of this process and of others: these have little to do, and users
wait for it, while computing chosen all the time there is. It still gets a quarter of a processor
that others want as well."""

_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_ROWS_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Histogram:
    """How many numbers were within each of fixed bounds, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """For each bound, the numbers up to it and above the one before; then those above all."""
        self.total = 0.0

    def note(self, number: float) -> None:
        """Count a number."""
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


class ComputeCounts:
    """What was computed since a peer began. The compute thread writes, any thread may read."""

    def __init__(self) -> None:
        self.decode_seconds = Histogram(_SECONDS_BOUNDS)
        """Computing times of steps of one token."""
        self.prefill_seconds = 0.0
        """Those of all other steps together."""
        self.queue_seconds = Histogram(_SECONDS_BOUNDS)
        """How long steps waited."""
        self.rows = Histogram(_ROWS_BOUNDS)
        """Rows (sequences) of iterations."""
        self.num_decode_tokens = 0
        self.num_prefill_tokens = 0
        self.num_passes = 0

    def note_step(self, work: StepWork, queue_seconds: float, compute_seconds: float) -> None:
        """Count a step that was computed."""
        self.queue_seconds.note(queue_seconds)
        if work.num_tokens == 1:
            self.num_decode_tokens += work.num_rows
            self.decode_seconds.note(compute_seconds)
        else:
            self.num_prefill_tokens += work.num_rows * work.num_tokens
            self.prefill_seconds += compute_seconds


@dataclass(slots=True)
class StepJob:
    """A waiting step and its progress: prompts are computed in parts."""

    work: StepWork
    tenant: tuple[str, str]
    future: asyncio.Future[ComputedStep]
    submitted_at: float
    token_cost: float = 1.0
    compute_seconds: float = 0.0
    num_done: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.work.num_tokens == 1

    def describe(self) -> WaitingStep:
        """Return the step as the policy sees it."""
        num_tokens = self.work.num_tokens - self.num_done
        return WaitingStep(
            id(self.work.cache),
            self.tenant,
            self.work.num_rows,
            num_tokens,
            self.is_decoding,
            self.token_cost,
        )

    def take(self, num_tokens: int) -> StepWork:
        """Return the next part."""
        return self.work.cut(self.num_done, num_tokens)

    def advance(self, num_tokens: int, output_BTH: Tensor, seconds: float) -> bool:
        """Note a part's result and its computing time; return whether it was the last part."""
        self.num_done += num_tokens
        self.compute_seconds += seconds
        if self.work.last_token_only:
            self.outputs.clear()
        self.outputs.append(output_BTH)
        return self.num_done == self.work.num_tokens

    def fail(self) -> None:
        """Take the cache back to what is left after a step that failed."""
        self.work.cache.fall_back(count_kept_tokens(self.work.position, self.work.row_map))

    def finish(self, now: float) -> ComputedStep | ShoalError:
        """Return the result of the whole step, or an error if there is no memory to join it in."""
        parts = self.outputs
        try:
            hidden_BTH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        except Exception:
            _logger.exception("the parts of a step could not be joined; the step is refused")
            self.fail()
            return RefusedError(ErrorCode.INTERNAL, "the peer failed to put the step together")
        queue_seconds = now - self.submitted_at - self.compute_seconds
        return ComputedStep(hidden_BTH, queue_seconds, self.compute_seconds)


@dataclass(slots=True)
class Iteration:
    """Steps, and parts of steps, that are computed together: urgent steps first."""

    parts: list[tuple[StepJob, StepWork]]
    num_urgent: int
    interrupted_seconds: float = 0.0

    @property
    def is_filling(self) -> bool:
        """Whether it gives way to urgent steps."""
        return len(self.parts) > self.num_urgent


_NOTHING: Final = Iteration([], 0)


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    future: asyncio.Future[Any] | None


class ComputeThread:
    """Runs an engine on a thread of its own, owned by one event loop.

    The loop submits and awaits; it never blocks on the thread. The thread answers through
    `call_soon_threadsafe` and knows nothing else of asyncio. Use it as an async context manager.
    """

    def __init__(
        self, engine: Engine, token_budget: int = 512, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`token_budget` is the most tokens (rows times length) in one iteration."""
        self._engine = engine
        self._now = now
        self._token_budget = token_budget
        self.budget = IterationBudget(token_budget, engine.part_tokens, len(engine.span))
        self._usage: Usage = {}
        self._loop = asyncio.get_running_loop()
        self.wake = threading.Condition()
        self._jobs: Final[deque[StepJob]] = deque()
        self._calls: Final[deque[_Call]] = deque()
        self.passes: Final = PassQueue(now)
        self.counts = ComputeCounts()
        self._is_decoding_new = False
        self._is_stopping = False
        self.died: Final[asyncio.Future[None]] = self._loop.create_future()
        """Done once an error has ended the thread."""
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    async def __aenter__(self) -> "ComputeThread":
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.wake:
            self._is_stopping = True
            self.wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def queue_seconds(self) -> float:
        """Estimate how long a step of one more client would wait now."""
        with self.wake:
            num_tenants = len({job.tenant for job in self._jobs})
        return num_tenants * self.budget.iteration_seconds

    @property
    def pass_queue_seconds(self) -> float:
        """Estimate how long a pass of one more client would wait now."""
        with self.wake:
            passes = self.passes
            return passes.queue_seconds if passes.jobs or passes.running else 0.0

    def submit(
        self, work: StepWork, tenant: tuple[str, str] = ("", "")
    ) -> asyncio.Future[ComputedStep]:
        """Queue a step. The future fails with RefusedError when the engine declines the step.

        `tenant` is whose it is, for equal shares. Cancelling the future drops the step, or
        what is left of a prompt, unless that part has begun.
        """
        future: asyncio.Future[ComputedStep] = self._loop.create_future()
        job = StepJob(work, tenant, future, self._now())
        if work.adapter is not None:
            num_weight_bytes = self._engine.num_weight_bytes
            job.token_cost = count_token_cost(work.adapter.num_numbers, num_weight_bytes)
        with self.wake:
            if job.is_decoding:
                self._is_decoding_new = True
        self._enqueue(self._jobs.append, job)
        return future

    def limit_passes(self, num_bytes: int) -> None:
        """Let passes interrupt each other only if all of them fit into so much memory."""
        self.passes.max_bytes = num_bytes

    def submit_pass(
        self,
        run: Callable[[GiveWay], Any],
        cost: int,
        tenant: tuple[str, str] = ("", ""),
        num_bytes: int = 0,
    ) -> PassJob:
        """Queue a pass: `run` computes it, and calls its argument every few milliseconds.

        Passes get the time in which no step waits, and a share of the rest.
        """
        loop = self._loop
        future, released = loop.create_future(), loop.create_future()
        job = PassJob(run, cost, tenant, future, released, self._now(), num_bytes)
        self._enqueue(self.passes.append, job)
        return job

    def drop_pass(self, job: PassJob) -> None:
        """Cancel a pass, even if it runs: it is released soon."""
        job.future.cancel()
        self.post(self._release_cancelled)

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function on the thread between two iterations, in order of the calls."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._enqueue(self._calls.append, _Call(function, future))
        return future

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the thread and forget it, unless the thread is stopping already."""
        with self.wake:
            if not self._is_stopping:
                self._calls.append(_Call(function, None))
                self.wake.notify()

    def _enqueue(self, append: Callable[[Any], None], item: StepJob | _Call | PassJob) -> None:
        with self.wake:
            if not self._is_stopping:
                append(item)
                self.wake.notify()
                return
        self._turn_away(item)

    def _run(self) -> None:
        _lower_priority()
        try:
            while self._wait_for_work():
                self.iterate()
        except BaseException:
            self._answer(self.died, None)
            raise
        finally:
            # Also when the loop above failed: no future may wait for a dead thread.
            with self.wake:
                self._is_stopping = True
            for item in (*self._calls, *self._jobs, *self.passes.take_all()):
                self._turn_away(item)
            self._calls.clear()
            self._jobs.clear()

    def _wait_for_work(self) -> bool:
        with self.wake:
            self.wake.wait_for(
                lambda: self._jobs or self._calls or self.passes.jobs or self._is_stopping
            )
            return not self._is_stopping

    def iterate(self) -> None:
        """One iteration: control calls, what the policy chose, together, and a pass."""
        self._run_calls()
        iteration = self._choose_iteration()
        if iteration.parts:
            self._compute(iteration)
        if self.passes.jobs and (job := self._choose_pass()) is not None:
            self._run_pass(job)

    def _run_pass(self, job: PassJob) -> None:
        try:
            result = self.passes.run(job, self._run_interruption)
        except BaseException:
            self.passes.append(job)  # like in `_compute`
            raise
        self.counts.num_passes += isinstance(result, ComputedPass)
        self._answer(job.future, result)
        self._answer(job.released, None)

    def _run_interruption(self, kinds: Collection[Interruption]) -> Interruption | None:
        """Compute other work in the middle of a pass; return its kind."""
        if self._is_stopping:
            raise _make_stopping_error()
        self._run_calls()
        if self._jobs and Interruption.TOKENS in kinds:
            is_whole = Interruption.PROMPTS in kinds
            iteration = self._choose_iteration() if is_whole else self._choose_urgent()
            if iteration.parts:
                self._compute(iteration)
                return Interruption.PROMPTS if iteration.is_filling else Interruption.TOKENS
        is_pass_due = self.passes.jobs and Interruption.PASS in kinds
        if is_pass_due and (job := self._choose_pass()) is not None:
            self._run_pass(job)
            return Interruption.PASS
        return None

    def _choose_pass(self) -> PassJob | None:
        self._release_cancelled()
        with self.wake:
            return self.passes.choose()

    def _release_cancelled(self) -> None:
        with self.wake:
            cancelled = self.passes.take_cancelled()
        for job in cancelled:
            self._answer(job.released, None)

    def _compute(self, iteration: Iteration) -> None:
        started_at = self._now()
        give_way = None
        if iteration.is_filling:
            self.budget.begin_filling(started_at)
            give_way = partial(self._give_way, iteration)
        try:
            results = self._execute([part for _, part in iteration.parts], give_way)
            now = self._now()
            self._deliver(iteration, results, now, now - started_at - iteration.interrupted_seconds)
        except BaseException:
            # The thread is about to die; `_run` answers what is in the queue.
            with self.wake:
                self._jobs.extendleft(job for job, _ in iteration.parts)
            raise

    def _give_way(self, iteration: Iteration) -> None:
        """Compute steps that have become urgent, before a filling iteration goes on."""
        now = self._now()
        if self._is_decoding_new and self.budget.must_give_way(now):
            urgent = self._choose_urgent(iteration)
            if urgent.parts:
                self._compute(urgent)
                iteration.interrupted_seconds += self._now() - now

    def _execute(
        self, works: list[StepWork], give_way: Callable[[], object] | None = None
    ) -> list[Tensor | ShoalError]:
        try:
            results = list(self._engine.execute(works, give_way))
            if len(results) != len(works):
                raise LocalProtocolError(f"{len(works)} steps got {len(results)} results")
            return results
        except Exception:
            _logger.exception(
                "the engine failed on a batch of %d steps; each is tried alone", len(works)
            )
        return [self._execute_alone(work, is_retry=len(works) > 1) for work in works]

    def _execute_alone(self, work: StepWork, is_retry: bool) -> Tensor | ShoalError:
        """Isolate a session's failure from its batch: try each step again.

        Not if rows were to be reordered: they may have been reordered already.
        """
        if is_retry and work.row_map is None:
            return self._execute([work])[0]
        return RefusedError(ErrorCode.INTERNAL, "the peer failed to compute the step")

    def _run_calls(self) -> None:
        # Only those that are there now: calls that keep coming must not delay steps.
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            try:
                result = call.function()
            except Exception as error:
                if call.future is None:
                    _logger.exception("a call on the compute thread failed")
                result = error
            self._answer(call.future, result)

    def _choose_iteration(self) -> Iteration:
        with self.wake:
            now = self._now()
            jobs, waiting = self._look()
            crowding = self.budget.find_crowding(now)
            chosen = urgent = choose_urgent(waiting, self._usage, self._token_budget, crowding)
            if not urgent or self.budget.is_filling_owed:
                chosen = choose_batch(
                    waiting,
                    self._usage,
                    self._token_budget,
                    self.budget.choose_num_tokens(now),
                    self._engine.part_tokens,
                    crowding,
                )
            return Iteration(self._take(jobs, waiting, chosen), len(urgent))

    def _choose_urgent(self, interrupted: Iteration = _NOTHING) -> Iteration:
        with self.wake:
            jobs, waiting = self._look()
            crowding = self.budget.find_crowding(self._now())
            running = [job.describe() for job, _ in interrupted.parts]
            chosen = choose_urgent(waiting, self._usage, self._token_budget, crowding, running)
            parts = self._take(jobs, waiting + running, chosen) if chosen else []
            return Iteration(parts, len(chosen))

    def _look(self) -> tuple[list[StepJob], list[WaitingStep]]:
        """Return the waiting jobs, and the same as the policy sees them."""
        self._is_decoding_new = False
        jobs = [job for job in self._jobs if not job.future.cancelled()]
        now = self._now()
        for job in jobs:
            if job.is_decoding:
                self._note_decoding(job, now)
        return jobs, [job.describe() for job in jobs]

    def _take(
        self, jobs: list[StepJob], present: list[WaitingStep], chosen: list[ScheduledPart]
    ) -> list[tuple[StepJob, StepWork]]:
        """Take what was chosen out of the queue, and charge its tenants."""
        self._usage = renew_usage(self._usage, present, chosen)
        taken = {part.index for part in chosen}
        # In place: another thread may wait for the lock to append to this very queue.
        self._jobs.clear()
        self._jobs.extend(job for index, job in enumerate(jobs) if index not in taken)
        return [(jobs[part.index], jobs[part.index].take(part.num_tokens)) for part in chosen]

    def _deliver(
        self,
        iteration: Iteration,
        results: list[Tensor | ShoalError],
        now: float,
        seconds: float,
    ) -> None:
        """Answer finished steps, and put the others back at the front of the queue."""
        unfinished: list[StepJob] = []
        self.counts.rows.note(sum(part.num_rows for _, part in iteration.parts))
        for (job, part), result in zip(iteration.parts, results, strict=True):
            if not isinstance(result, Tensor):
                job.fail()
                self._answer(job.future, result)
            elif job.advance(part.num_tokens, result, seconds):
                computed = job.finish(now)
                if isinstance(computed, ComputedStep):
                    times = computed.queue_seconds, computed.compute_seconds
                    self.counts.note_step(job.work, *times)
                self._answer(job.future, computed)
            else:
                unfinished.append(job)
        num_filling = sum(
            job.describe().count_cost(part.num_tokens)
            for job, part in iteration.parts[iteration.num_urgent :]
        )
        with self.wake:
            self.budget.note_iteration(now, seconds, iteration.num_urgent, num_filling)
            for job, _ in iteration.parts:
                if job.is_decoding:
                    self._note_decoding(job, now)
            self._jobs.extendleft(reversed(unfinished))

    def _note_decoding(self, job: StepJob, now: float) -> None:
        # While a step waits, which may be for longer than counts as recent, and at its end.
        num_rows = job.work.num_rows * job.token_cost
        self.budget.note_decoding(now, job.tenant, id(job.work.cache), num_rows)

    def _turn_away(self, item: StepJob | _Call | PassJob) -> None:
        self._answer(item.future, _make_stopping_error())
        if isinstance(item, PassJob):
            self._answer(item.released, None)

    def _answer(self, future: asyncio.Future[Any] | None, result: object) -> None:
        def settle() -> None:
            if future is None or future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
                if isinstance(result, RefusedError):
                    future.exception()  # an answer, not a failure: no one has to read it
            else:
                future.set_result(result)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop is closed: the answer has no reader.
            return


def _make_stopping_error() -> RefusedError:
    return RefusedError(ErrorCode.DRAINING, "the peer is shutting down")


def _lower_priority() -> None:
    """Give the calling thread, and threads that it starts, a smaller share than others have.

    Others are those that the operating system weighs against it: a session's or a container's
    threads, where it groups them. Only on Linux do threads have a priority of their own; elsewhere
    nothing changes.
    """
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
