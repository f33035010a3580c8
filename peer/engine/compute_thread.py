"""The one thread that touches the device, and the messages by which the event loop reaches it."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from ...protocol.errors import ErrorCode, LocalProtocolError, RefusedError, ShoalError
from .engine import Engine, StepWork
from .scheduler import WaitingStep, choose_batch

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The hidden states a step led to, and how long it waited and computed."""

    hidden_BTH: Tensor
    queue_seconds: float
    compute_seconds: float


@dataclass(slots=True)
class _Job:
    work: StepWork
    future: asyncio.Future[ComputedStep]
    submitted_at: float
    num_passes: int = 0


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    future: asyncio.Future[Any] | None


class ComputeThread:
    """Runs an engine on a thread of its own, owned by one event loop.

    The loop submits and awaits; it never blocks on the thread. The thread answers through
    `call_soon_threadsafe` and knows nothing else of asyncio. Use it as an async context manager.
    """

    def __init__(self, engine: Engine, token_budget: int = 512) -> None:
        self._engine = engine
        self._token_budget = token_budget
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._calls: deque[_Call] = deque()
        self._is_stopping = False
        self._recent_step_seconds = 0.0
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
        """Estimate how long a decode step submitted now would wait."""
        return len(self._jobs) * self._recent_step_seconds

    def submit(self, work: StepWork) -> asyncio.Future[ComputedStep]:
        """Queue a step. The future fails with RefusedError when the engine declines the step.

        Cancelling the future drops the step if it has not begun.
        """
        future: asyncio.Future[ComputedStep] = self._loop.create_future()
        self._enqueue(self._jobs, _Job(work, future, time.monotonic()))
        return future

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function on the thread between two iterations, in order of the calls."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self._enqueue(self._calls, _Call(function, future))
        return future

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the thread and forget it, unless the thread is stopping already."""
        with self._wake:
            if not self._is_stopping:
                self._calls.append(_Call(function, None))
                self._wake.notify()

    def _enqueue(self, queue: deque[Any], item: _Job | _Call) -> None:
        with self._wake:
            if not self._is_stopping:
                queue.append(item)
                self._wake.notify()
                return
        self._answer(item.future, _make_stopping_error())

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        finally:
            # Also when the loop above failed: nobody may be left waiting for a dead thread.
            with self._wake:
                self._is_stopping = True
            for item in (*self._calls, *self._jobs):
                self._answer(item.future, _make_stopping_error())
            self._calls.clear()
            self._jobs.clear()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._calls or self._is_stopping)
            return not self._is_stopping

    def step(self) -> None:
        """One iteration: control calls, then the batch that the policy chose."""
        self._run_calls()
        batch = self._take_batch()
        if batch:
            started_at = time.monotonic()
            results = self._execute([job.work for job in batch])
            self._deliver(batch, results, started_at, time.monotonic() - started_at)

    def _execute(self, works: list[StepWork]) -> list[Tensor | ShoalError]:
        try:
            results = list(self._engine.execute(works))
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

    def _take_batch(self) -> list[_Job]:
        with self._wake:
            jobs = [job for job in self._jobs if not job.future.cancelled()]
            waiting = [
                WaitingStep(
                    id(job.work.cache),
                    job.work.hidden_BTH.shape[0] * job.work.hidden_BTH.shape[1],
                    job.work.hidden_BTH.shape[1] == 1,
                    job.num_passes,
                )
                for job in jobs
            ]
            chosen = choose_batch(waiting, self._token_budget)
            taken = [jobs[index] for index in chosen]
            chosen_set = set(chosen)
            self._jobs = deque(job for i, job in enumerate(jobs) if i not in chosen_set)
            for job in self._jobs:
                job.num_passes += 1
            return taken

    def _deliver(
        self,
        batch: list[_Job],
        results: list[Tensor | ShoalError],
        started_at: float,
        compute_seconds: float,
    ) -> None:
        self._recent_step_seconds += 0.1 * (compute_seconds - self._recent_step_seconds)
        for job, result in zip(batch, results, strict=True):
            if isinstance(result, Tensor):
                queue_seconds = started_at - job.submitted_at
                self._answer(job.future, ComputedStep(result, queue_seconds, compute_seconds))
            else:
                self._answer(job.future, result)

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
