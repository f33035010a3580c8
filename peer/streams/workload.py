"""The seam between a peer and the kinds of work that it does for others.

A workload lasts as long as one span is served. For each stream it makes a `StreamWork`, to which
the stream hands the messages of its kinds. See docs/new-workload.md for how to add one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...kernels.pauses import GiveWay
from ...protocol.fair_share import Holder
from ...protocol.ids import SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.session import Queued
from ...protocol.records.announcements import Announcement
from ..engine.compute_thread import ComputedStep
from ..engine.pass_queue import PassJob
from ..engine.steps import StepWork
from .answer_queue import AnswerQueue

_Result = TypeVar("_Result")

_KEEP_ALIVE_SECONDS = 1.0

Handler = Callable[[Any], Awaitable[None] | bool | None]
"""Takes a message of one type. False: it belongs to another workload that takes this type as well.

What it raises ends the stream: RefusedError and RemoteProtocolError with an answer that says why.
"""


@dataclass(eq=False)
class ClientStream:
    """The interface of workloads to one stream."""

    answers: AnswerQueue
    version: int = 0
    """The protocol version that both ends speak; 0 until Hello was said."""
    tasks: asyncio.TaskGroup | None = None

    @property
    def holder(self) -> Holder:
        """The holder against whom the stream's bytes and work are counted."""
        return self.answers.holder

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Do something that ends with the stream."""
        assert self.tasks is not None  # messages come only while the stream is served
        return self.tasks.create_task(work)


class StreamWork(Protocol):
    """One workload on one stream. Derive from it for what is not written out below."""

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """The handler of each message type. Those of all workloads make one table."""
        ...

    @property
    def active_at(self) -> float:
        """When something was last begun here, came further or was over; now, while it is done.

        By the peer's clock. A stream ends on which nothing was done for long.
        """
        return float("-inf")

    @property
    def is_in_use(self) -> bool:
        """Whether the client may well be silent for long: without it the stream ends soon."""
        return False

    def stop(self) -> None:
        """Stop waiting for the client: give up answers that depend on it."""

    def end(self) -> None:
        """Free everything: the stream has ended."""


class Workload(Protocol):
    """One kind of work, while one span is served. Derive from it for what is not written out."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that a peer waits for before it leaves.

        When that becomes true, the workload calls the `note_change` that it was made with.
        """
        return True

    def attend(self, stream: ClientStream) -> StreamWork:
        """Return the object that handles this workload's messages on a new stream."""
        ...

    def begin_draining(self) -> None:
        """Refuse new work from now on, and tell clients whose work is under way."""

    def count(self) -> Mapping[str, int]:
        """Return the counts of work under way, by names for people."""
        return {}

    async def describe(self, announcement: Announcement) -> Announcement:
        """Return the peer's announcement with the present load of this workload."""
        return announcement

    def close(self) -> None:
        """Free all memory for the next span: all streams have ended."""


class Compute(Protocol):
    """The compute thread, to which workloads submit jobs. Times are estimates in seconds."""

    @property
    def queue_seconds(self) -> float:
        """Seconds that a step of one more client would wait now."""
        ...

    @property
    def pass_queue_seconds(self) -> float:
        """Seconds that a pass of one more client would wait now."""
        ...

    def submit(
        self, work: StepWork, holder: tuple[str, str] = ("", "")
    ) -> asyncio.Future[ComputedStep]:
        """Queue a step of a session; see `ComputeThread.submit`."""
        ...

    def submit_pass(
        self,
        run: Callable[[GiveWay], Any],
        cost: int,
        holder: tuple[str, str] = ("", ""),
        num_bytes: int = 0,
    ) -> PassJob:
        """Queue long work that gives way to steps; see `ComputeThread.submit_pass`."""
        ...

    def drop_pass(self, job: PassJob) -> None:
        """Give a job up; soon it is released."""
        ...

    def limit_passes(self, num_bytes: int) -> None:
        """Bound the memory of passes that are computed at the same time."""
        ...

    def call(self, function: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Run something short between two iterations."""
        ...

    def post(self, function: Callable[[], object]) -> None:
        """Run something short between two iterations, without waiting for it."""
        ...


class KeepAlive:
    """Tells a client every second that one request of a stream is still under way."""

    def __init__(self, compute: Compute, answers: AnswerQueue) -> None:
        self._compute = compute
        self._answers = answers
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, question: SessionId) -> None:
        """Say so now, and again until `stop`."""
        self.stop()
        self._answers.say(Queued(question, 0, self._compute.pass_queue_seconds))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_KEEP_ALIVE_SECONDS, self.begin, question)

    def stop(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
