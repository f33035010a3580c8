"""The one thread that touches the device, and the messages by which the event loop reaches it."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from torch import Tensor

from ...protocol.errors import ErrorCode, LocalProtocolError, RefusedError, ShoalError
from .engine import Engine
from .jobs import ComputedStep, Iteration, Job
from .pace import Pace
from .pass_queue import GiveWay, Guest, PassJob, PassQueue
from .priority import give_way_to_loops
from .scheduler import (
    Take,
    Usage,
    WaitingStep,
    choose_batch,
    choose_urgent,
    count_cost,
    renew_usage,
)
from .steps import StepWork

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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
        self._engine = engine
        self._now = now
        self._token_budget = token_budget
        self._pace = Pace(token_budget, engine.part_tokens, len(engine.span))
        self._usage: Usage = {}
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._jobs: Final[deque[Job]] = deque()
        self._calls: Final[deque[_Call]] = deque()
        self._passes: Final = PassQueue(now)
        self._is_decoding_new = False
        self._is_stopping = False
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
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def queue_seconds(self) -> float:
        """Estimate how long a step of one more client would wait now."""
        with self._wake:
            num_holders = len({job.holder for job in self._jobs})
        return num_holders * self._pace.iteration_seconds

    @property
    def pass_queue_seconds(self) -> float:
        """Estimate how long a pass of one more client would wait now."""
        with self._wake:
            return self._passes.queue_seconds

    def submit(
        self, work: StepWork, holder: tuple[str, str] = ("", "")
    ) -> asyncio.Future[ComputedStep]:
        """Queue a step. The future fails with RefusedError when the engine declines the step.

        `holder` is whose it is, for equal shares. Cancelling the future drops the step, or
        what is left of a prompt, unless that part has begun.
        """
        future: asyncio.Future[ComputedStep] = self._loop.create_future()
        job = Job(work, holder, future, self._now())
        with self._wake:
            if job.is_decoding:
                self._is_decoding_new = True
                self._note_decoding(job, job.submitted_at)
        self._enqueue(self._jobs.append, job)
        return future

    def limit_passes(self, num_bytes: int) -> None:
        """Let no more guests into a pass than find room with it in so much memory."""
        self._passes.max_bytes = num_bytes

    def submit_pass(
        self,
        run: Callable[[GiveWay], Any],
        cost: int,
        holder: tuple[str, str] = ("", ""),
        num_bytes: int = 0,
    ) -> PassJob:
        """Queue a pass: `run` computes it, and calls what it is given every few milliseconds.

        Passes are for the time in which no step waits, and for a part of the other.
        """
        loop = self._loop
        future, released = loop.create_future(), loop.create_future()
        job = PassJob(run, cost, holder, future, released, self._now(), num_bytes)
        self._enqueue(self._passes.append, job)
        return job

    def drop_pass(self, job: PassJob) -> None:
        """Give a pass up, also when it has begun: soon it is released."""
        job.future.cancel()
        self.post(self._release_cancelled)

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function on the thread between two iterations, in order of the calls."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._enqueue(self._calls.append, _Call(function, future))
        return future

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the thread and forget it, unless the thread is stopping already."""
        with self._wake:
            if not self._is_stopping:
                self._calls.append(_Call(function, None))
                self._wake.notify()

    def _enqueue(self, append: Callable[[Any], None], item: Job | _Call | PassJob) -> None:
        with self._wake:
            if not self._is_stopping:
                append(item)
                self._wake.notify()
                return
        self._turn_away(item)

    def _run(self) -> None:
        give_way_to_loops()
        try:
            while self._wait_for_work():
                self.step()
        finally:
            # Also when the loop above failed: nobody may be left waiting for a dead thread.
            with self._wake:
                self._is_stopping = True
            for item in (*self._calls, *self._jobs, *self._passes.take_all()):
                self._turn_away(item)
            self._calls.clear()
            self._jobs.clear()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(
                lambda: self._jobs or self._calls or self._passes or self._is_stopping
            )
            return not self._is_stopping

    def step(self) -> None:
        """One iteration: control calls, what the policy chose, together, and a pass."""
        self._run_calls()
        iteration = self._choose_iteration()
        if iteration.parts:
            self._compute(iteration)
        job = self._choose_pass()
        if job is not None:
            self._run_pass(job)

    def _run_pass(self, job: PassJob) -> None:
        try:
            result = self._passes.run(job, self._let_in)
        except BaseException:
            self._passes.append(job)  # like in `_compute`
            raise
        self._answer(job.future, result)
        self._answer(job.released, None)

    def _let_in(self, kinds: Collection[Guest]) -> Guest | None:
        """Compute something of others while a pass stands still; return what that was."""
        if self._is_stopping:
            raise _make_stopping_error()
        self._run_calls()
        if self._jobs and Guest.TOKENS in kinds:
            is_whole = Guest.PROMPTS in kinds
            iteration = self._choose_iteration() if is_whole else self._choose_urgent()
            if iteration.parts:
                self._compute(iteration)
                return Guest.PROMPTS if iteration.is_filling else Guest.TOKENS
        if self._passes and Guest.PASS in kinds and (job := self._choose_pass()) is not None:
            self._run_pass(job)
            return Guest.PASS
        return None

    def _choose_pass(self) -> PassJob | None:
        self._release_cancelled()
        with self._wake:
            return self._passes.choose()

    def _release_cancelled(self) -> None:
        with self._wake:
            cancelled = self._passes.take_cancelled()
        for job in cancelled:
            self._answer(job.released, None)

    def _compute(self, iteration: Iteration) -> None:
        started_at = self._now()
        before_block = None
        if iteration.is_filling:
            self._pace.begin_filling(started_at)
            before_block = partial(self._give_way, iteration)
        try:
            results = self._execute([part for _, part in iteration.parts], before_block)
            now = self._now()
            self._deliver(iteration, results, now, now - started_at - iteration.interrupted_seconds)
        except BaseException:
            # The thread is about to die; `_run` answers what is in the queue.
            with self._wake:
                self._jobs.extendleft(job for job, _ in iteration.parts)
            raise

    def _give_way(self, iteration: Iteration) -> None:
        """Compute what has become urgent, before an iteration that fills the time goes on."""
        now = self._now()
        if self._is_decoding_new and self._pace.must_give_way(now):
            urgent = self._choose_urgent(iteration)
            if urgent.parts:
                self._compute(urgent)
                iteration.interrupted_seconds += self._now() - now

    def _execute(
        self, works: list[StepWork], before_block: Callable[[], object] | None = None
    ) -> list[Tensor | ShoalError]:
        try:
            results = list(self._engine.execute(works, before_block))
            if len(results) != len(works):
                raise LocalProtocolError(f"{len(works)} steps got {len(results)} results")
            return results
        except Exception:
            _logger.exception("the engine failed on %d steps", len(works))
        return [self._execute_alone(work, is_retry=len(works) > 1) for work in works]

    def _execute_alone(self, work: StepWork, is_retry: bool) -> Tensor | ShoalError:
        """Keep one session's failure from the others of its batch: try each of them again.

        Not where rows were to be moved: they may have been moved already.
        """
        if is_retry and work.row_map is None:
            return self._execute([work])[0]
        return RefusedError(ErrorCode.INTERNAL, "the peer failed to compute the step")

    def _run_calls(self) -> None:
        # Those that are there now: calls that keep coming must not keep the steps waiting.
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
        with self._wake:
            now = self._now()
            jobs, waiting = self._look()
            crowding = self._pace.find_crowding(now)
            takes = urgent = choose_urgent(waiting, self._usage, self._token_budget, crowding)
            if not urgent or self._pace.is_filling_owed:
                takes = choose_batch(
                    waiting,
                    self._usage,
                    self._token_budget,
                    self._pace.choose_budget(now),
                    self._engine.part_tokens,
                    crowding,
                )
            return Iteration(self._take(jobs, waiting, takes), len(urgent))

    def _choose_urgent(self, interrupted: Iteration = _NOTHING) -> Iteration:
        with self._wake:
            jobs, waiting = self._look()
            crowding = self._pace.find_crowding(self._now())
            running = [job.describe() for job, _ in interrupted.parts]
            takes = choose_urgent(waiting, self._usage, self._token_budget, crowding, running)
            parts = self._take(jobs, waiting + running, takes) if takes else []
            return Iteration(parts, len(takes))

    def _look(self) -> tuple[list[Job], list[WaitingStep]]:
        """Return the jobs that wait, and what the policy may know of them."""
        self._is_decoding_new = False
        jobs = [job for job in self._jobs if not job.future.cancelled()]
        return jobs, [job.describe() for job in jobs]

    def _take(
        self, jobs: list[Job], present: list[WaitingStep], takes: list[Take]
    ) -> list[tuple[Job, StepWork]]:
        """Take what was chosen out of the queue, and charge those whose it is."""
        self._usage = renew_usage(self._usage, present, takes)
        taken = {take.index for take in takes}
        # In place: somebody may wait for the lock to append to this very queue.
        self._jobs.clear()
        self._jobs.extend(job for index, job in enumerate(jobs) if index not in taken)
        return [(jobs[take.index], jobs[take.index].take(take.num_tokens)) for take in takes]

    def _deliver(
        self,
        iteration: Iteration,
        results: list[Tensor | ShoalError],
        now: float,
        seconds: float,
    ) -> None:
        """Answer what is done, and put back at the front of the queue what is not."""
        unfinished: list[Job] = []
        for (job, part), result in zip(iteration.parts, results, strict=True):
            if not isinstance(result, Tensor):
                job.fail()
                self._answer(job.future, result)
            elif job.advance(part.num_tokens, result, seconds):
                self._answer(job.future, job.finish(now))
            else:
                unfinished.append(job)
        num_filling = sum(
            count_cost(part.num_rows * part.num_tokens, job.is_decoding)
            for job, part in iteration.parts[iteration.num_urgent :]
        )
        with self._wake:
            self._pace.note(now, seconds, iteration.num_urgent, num_filling)
            for job, _ in iteration.parts:
                if job.is_decoding:
                    self._note_decoding(job, now)
            self._jobs.extendleft(reversed(unfinished))

    def _note_decoding(self, job: Job, now: float) -> None:
        # When it comes and when it is done: a step may wait for longer than is called recent.
        self._pace.note_decoding(now, job.holder, id(job.work.cache), job.work.num_rows)

    def _turn_away(self, item: Job | _Call | PassJob) -> None:
        """Answer what comes too late."""
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
                    future.exception()  # an answer, not a failure: who left need not read it
            else:
                future.set_result(result)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop is closed: nobody is left to read the answer.
            return


def _make_stopping_error() -> RefusedError:
    return RefusedError(ErrorCode.DRAINING, "the peer is shutting down")
