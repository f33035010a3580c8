"""Sessions as a workload: what the messages of one stream do to the sessions of a peer.

`protocol.session` decides what to do with a step, `engine.scheduler` what to compute next.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import BUSY_SECONDS
from ...protocol.ids import NO_CAPABILITY, Capability, SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.session import (
    Admit,
    Attach,
    Close,
    Leaving,
    Mirror,
    Open,
    Probe,
    Queued,
    Redirect,
    Step,
)
from ...protocol.records.announcements import Announcement
from ...protocol.session.session_state import StepAction
from ...protocol.versions import HANDOFF_VERSION
from ..engine.steps import ComputedStep
from ..streams.client_stream import Answer, ClientStream, Handler, StreamWork, encode_refusal
from ..streams.service import Limits, Workload
from .admission import Admission
from .held_session import (
    HeldSession,
    check_step_size,
    conclude,
    control,
    encode_gap,
    encode_opened,
    make_work,
)
from .session_prompts import SessionPrompts

_SPEED_SMOOTHING = 0.05
"""Weight of the newest step: the average looks back over some twenty."""

_SPEED_SECONDS = 30.0
"""How long after the last step that decodes its speed is the present one."""


class LoadedSpeed:
    """How fast one session decodes beside all others, as its steps are computed.

    Without the time that they wait: announcements tell that separately.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seconds = 0.0
        self._noted_at = float("-inf")

    @property
    def steps_per_second(self) -> float | None:
        """Steps through the whole span; None where nobody has decoded of late."""
        is_recent = self._now() - self._noted_at <= _SPEED_SECONDS
        return 1 / self._seconds if is_recent and self._seconds > 0 else None

    def note(self, compute_seconds: float, span_fraction: float) -> None:
        """Note a step of one token of one row through a part of the span."""
        seconds = compute_seconds / span_fraction
        is_first = self.steps_per_second is None
        self._seconds += (1.0 if is_first else _SPEED_SMOOTHING) * (seconds - self._seconds)
        self._noted_at = self._now()


class SessionWorkload(Workload):
    """All sessions of a peer."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.speed = LoadedSpeed(admission.clock.now)
        self.streams: set[SessionStreamWork] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no session is held, being opened or waiting, be it for its prompts."""
        admission = self.admission
        if admission.sessions or admission.num_opening or admission.num_waiting:
            return False
        return not any(stream.awaits_prompts for stream in self.streams)

    def accept(self, stream: ClientStream) -> SessionStreamWork:
        """See Workload.accept."""
        work = SessionStreamWork(self, stream)
        self.streams.add(work)
        return work

    def begin_draining(self) -> None:
        """Open no more sessions; have clients move those that are here."""
        self.admission.is_draining = True
        self.admission.look_again()
        for stream in self.streams:
            stream.say_leaving()

    def count(self) -> Mapping[str, int]:
        """See Workload.count."""
        return {"sessions": len(self.admission.sessions)}

    def apply_limits(self, limits: Limits) -> None:
        """See Workload.apply_limits."""
        self.admission.limit(limits)

    def describe(self, announcement: Announcement) -> Announcement:
        """Add how long steps wait, how fast they are computed, and the room for sessions."""
        admission = self.admission
        return replace(
            announcement,
            queue_seconds=announcement.queue_seconds + admission.compute.queue_seconds,
            loaded_decode_steps_per_second=self.speed.steps_per_second,
            free_kv_tokens=admission.engine.pool.free_tokens,
            num_sessions=len(admission.sessions),
        )

    def measure(self) -> Mapping[str, float]:
        """See Workload.measure."""
        admission, pool = self.admission, self.admission.engine.pool
        return {
            "sessions": len(admission.sessions),
            "sessions_waiting": admission.num_waiting,
            "kv_used_bytes": pool.committed_bytes,
            "kv_budget_bytes": pool.budget_bytes,
            "kv_free_tokens": pool.free_tokens,
            "queue_seconds": admission.compute.queue_seconds,
            "weight_bytes": admission.engine.num_weight_bytes,
        }


class SessionStreamWork(StreamWork):
    """The sessions that one stream opened, pushes to, and waits for."""

    def __init__(self, workload: SessionWorkload, stream: ClientStream) -> None:
        self._workload = workload
        self._stream = stream
        self._answers = stream.answers
        self._admission = admission = workload.admission
        resources = admission.resources
        self._prompts = SessionPrompts(
            admission.engine, admission.compute, resources.prompts, resources.note_change
        )
        self._opened: dict[SessionId, HeldSession] = {}
        self._waiting: dict[SessionId, asyncio.Task[bytes]] = {}  # sessions that have to wait
        self._attached: dict[SessionId, Capability] = {}  # sessions that another peer pushes here
        self._used: set[SessionId] = set()  # those opened here, and others that are stepped here

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See StreamWork.handlers."""
        return {
            Step: self._take_step,
            Open: self._take_open,
            Close: self._take_close,
            Attach: self._attach,
            **self._prompts.make_handlers(self._open),
            **dict.fromkeys((Admit, Redirect, Mirror, Probe), self._control),
        }

    @property
    def active_at(self) -> float:
        """When a session was last stepped, on this stream or on another one."""
        self._forget_closed()
        sessions = self._admission.sessions
        return max((sessions[session].used_at for session in self._used), default=-math.inf)

    @property
    def is_in_use(self) -> bool:
        """Whether there is a session, or one is to be opened."""
        self._forget_closed()
        return bool(self._used or self._waiting or self._prompts)

    @property
    def awaits_prompts(self) -> bool:
        """Whether a session is opened once its prompts are here."""
        return len(self._prompts) > 0

    def _forget_closed(self) -> None:
        """Forget sessions that were closed, maybe on another stream."""
        sessions = self._admission.sessions
        if not self._used <= sessions.keys():
            self._used &= sessions.keys()
            self._attached = {s: shown for s, shown in self._attached.items() if s in self._used}
            self._stream.touch()

    def say_leaving(self) -> None:
        """Tell the client of every session here to move it, unless it is too old to understand."""
        if self._stream.version >= HANDOFF_VERSION:
            for session, held in self._opened.items():
                self._answers.say(Leaving(session, held.state.epoch))

    def stop(self) -> None:
        """Open nothing more."""
        for waiting in self._waiting.values():
            waiting.cancel()

    def end(self) -> None:
        """Close every session that was opened here."""
        self._prompts.end()
        self._workload.streams.discard(self)
        for session, held in self._opened.items():
            self._admission.close(session, held)

    def _control(self, message: Admit | Redirect | Mirror | Probe) -> None:
        counts = self._admission.resources.counts
        self._answers.put(control(message, self._opened.get(message.session), counts))

    def _attach(self, message: Attach) -> None:
        """Let another peer push to a session.

        A refusal does not say why: a stranger who tries capabilities learns nothing.
        """
        session = message.session
        held = self._admission.sessions.get(session)
        if held is None or not _may_push(message.capability, held):
            detail = "the session is not open for you here"
            error = RefusedError(ErrorCode.UNKNOWN_SESSION, detail)
            self._answers.refuse(session, error)
        else:
            self._attached[session] = message.capability
            self._used.add(session)

    def _take_close(self, message: Close) -> None:
        waiting = self._waiting.get(message.session)
        if waiting is not None:
            waiting.cancel()
        self._prompts.forget(message.session)
        if (held := self._opened.pop(message.session, None)) is not None:
            self._admission.close(message.session, held)

    def _take_open(self, message: Open) -> Awaitable[None] | None:
        """Open a session, once its prompts are here if it has any."""
        try:
            if message.session in self._waiting:
                raise RefusedError(ErrorCode.BAD_FRAME, "the session is already waiting")
            num_sessions = len(self._opened) + len(self._waiting) + len(self._prompts)
            if num_sessions >= limits.MAX_SESSIONS_PER_STREAM:
                raise RefusedError(ErrorCode.BUSY, "too many sessions on one stream", BUSY_SECONDS)
            self._admission.check(message)  # before its prompts come
            is_kept_back = self._prompts.expect(message, self._stream.tenant)
        except RefusedError as error:
            self._answers.refuse(message.session, error)
            return None
        return None if is_kept_back else self._open(message)

    async def _open(self, message: Open) -> None:
        """Open a session, now or after a wait, or say why not."""
        tenant, admission = self._stream.tenant, self._admission
        try:
            await self._prompts.read(message)
            opened = await admission.open(message, tenant, self._answers.post)
            frame = self.note_opened(message, *opened)
        except RefusedError as error:
            seconds = error.retry_after_seconds
            may_wait = message.max_wait_seconds > 0 and admission.may_wait(tenant)
            if may_wait and seconds is not None:
                self._wait_for_session(message, seconds)
                return
            frame = self._refuse(message, error)
        self._answers.put(frame)

    def _wait_for_session(self, message: Open, seconds: float) -> None:
        """Leave a session that has to wait to a task, and say about how long that takes."""

        async def wait() -> bytes:
            try:
                opened = await self._admission.wait(
                    message, self._stream.tenant, self._answers.post
                )
                return self.note_opened(message, *opened)
            except RefusedError as error:
                return self._refuse(message, error)

        def settle(task: asyncio.Task[bytes]) -> None:
            del self._waiting[message.session]
            is_known = not task.cancelled() and task.exception() is None
            self._answers.deliver(answer, task.result() if is_known else None)

        answer: Answer = asyncio.Future()
        self._stream.touch()
        self._waiting[message.session] = task = self._stream.begin(wait())
        task.add_done_callback(settle)
        self._answers.say(Queued(message.session, message.epoch, seconds))
        self._answers.put(answer)

    def _refuse(self, message: Open, error: RefusedError) -> bytes:
        self._prompts.forget(message.session)
        return encode_refusal(message.session, 0, error, self._admission.resources.counts)

    def note_opened(self, message: Open, held: HeldSession, free_tokens: int) -> bytes:
        """Note a session that is open, with its prompts, and return the answer."""
        self._prompts.give(message.session, held)
        self._opened[message.session] = held
        self._used.add(message.session)
        self._stream.touch()
        queue_seconds = self._admission.compute.queue_seconds
        return encode_opened(message, queue_seconds, free_tokens)

    def _take_step(self, step: Step) -> None:
        held = self._find_session(step.session)
        try:
            if held is None:
                raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session is not open here")
            if held.capability and self._stream.tenant != held.tenant:
                check_epoch(step, held)
            decision = held.state.decide(step)
            if decision.action in (StepAction.EXECUTE, StepAction.ROLLBACK):
                self._check_size(step, held)
        except RefusedError as error:
            counts = self._admission.resources.counts
            self._answer(held, encode_refusal(step.session, step.sequence, error, counts))
            return
        if decision.action is StepAction.RESEND:
            self._answer(held, decision.answer)
        elif decision.action is StepAction.GAP:
            self._answer(held, encode_gap(step, held))
        elif decision.action in (StepAction.EXECUTE, StepAction.ROLLBACK):
            held.used_at = self._admission.clock.now()
            held.cache.touch()
            self._stream.touch()
            if not held.state.sequence and step.epoch > 1:  # the route before was another one
                self._admission.resources.counts.num_taken_over += 1
            held.state.accept(step)
            self._used.add(step.session)
            answer: Answer | None = None if held.capability else asyncio.Future()
            self._count_step(held, answer, len(step.hidden.data))
            future = self._admission.compute.submit(make_work(step, held), held.tenant)
            held.cache.running.add(future)
            future.add_done_callback(partial(self._settle, step, held, answer))
            if answer is not None:
                self._answers.put(answer)

    def _find_session(self, session: SessionId) -> HeldSession | None:
        """Return a session that may be stepped on this stream."""
        held = self._admission.sessions.get(session)
        if held is None or not held.capability or session in self._opened:
            return held
        return held if _may_push(self._attached.get(session, NO_CAPABILITY), held) else None

    def _answer(self, held: HeldSession | None, frame: bytes) -> None:
        """Answer a step: here, or, what is part of a chain, on the stream of its client."""
        if held is not None and held.capability:
            held.outputs.post(frame)
        else:
            self._answers.put(frame)

    def _settle(
        self,
        step: Step,
        held: HeldSession,
        answer: Answer | None,
        future: asyncio.Future[ComputedStep],
    ) -> None:
        """Note what became of a step, as soon as that is known, and give its sender the answer.

        At once, whether or not somebody still reads answers here: other streams may step the same
        session, and the memory of the step is free.
        """
        held.cache.running.discard(future)
        counts = self._admission.resources.counts
        frame = None if future.cancelled() else conclude(step, held, future, counts)
        if answer is not None:
            self._answers.deliver(answer, frame)
        elif frame is not None:
            held.outputs.post(frame)
        num_bytes = len(step.hidden.data)
        if not future.cancelled():
            self._count_step(held, answer, -num_bytes)
            self._note_speed(step, held, future)
            return
        # The engine may be at it still, and has it in its queue until the next iteration.
        dropped = self._admission.compute.call(bool)
        dropped.add_done_callback(lambda _: self._count_step(held, answer, -num_bytes))

    def _note_speed(
        self, step: Step, held: HeldSession, future: asyncio.Future[ComputedStep]
    ) -> None:
        rows, tokens, _ = step.hidden.shape
        if rows == tokens == 1 and future.exception() is None:
            fraction = len(held.cache.span) / len(self._admission.engine.span)
            self._workload.speed.note(future.result().compute_seconds, fraction)

    def _count_step(self, held: HeldSession, answer: Answer | None, num_bytes: int) -> None:
        """Count a step that waits for the engine: one that is pushed holds up no other session."""
        if answer is None:
            self._admission.resources.pushing.pending.count(held.tenant, num_bytes)
        else:
            self._answers.count(num_bytes)

    def _check_size(self, step: Step, held: HeldSession) -> None:
        has_next_hop = held.outputs.next is not None
        check_step_size(step, held.dtype, self._admission.engine.spec.hidden_size, has_next_hop)
        tenant = held.tenant if held.capability else self._stream.tenant
        pending = self._admission.resources.pushing.pending
        pending.check_room_for(tenant, len(step.hidden.data))


def check_epoch(step: Step, held: HeldSession) -> None:
    """Refuse what another peer pushes ahead of the client: only the client counts epochs.

    The session would keep an epoch that a hop made up, and drop all that others push after it.
    """
    if step.epoch > held.state.epoch:
        raise RefusedError(
            ErrorCode.BAD_FRAME,
            f"a step of epoch {step.epoch} was pushed, the client has admitted {held.state.epoch}",
        )


def _may_push(shown: Capability, held: HeldSession) -> bool:
    """Return whether a stream that has shown a capability may step a session."""
    return held.capability != NO_CAPABILITY and hmac.compare_digest(shown, held.capability)
