"""One stream of a client, or of a peer that pushes: messages in, work for the engine, messages out.

What to do with a step is decided by `protocol.session`; what to compute next by
`engine.scheduler`. Answers leave a stream in the order of their questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING

from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.fair_share import BUSY_SECONDS, Holder, check_room_for, name_holder
from ...protocol.ids import NO_CAPABILITY, Capability, SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.offers import Offer
from ...protocol.messages.session import Attach, Close, Hello, Leaving, Open, Opened, Queued, Step
from ...protocol.net.transport import Stream, open_gate
from ...protocol.session.table import Action
from ...protocol.versions import HANDOFF_VERSION
from ...protocol.wire.codec import decode_frame, encode_frame
from ..engine.compute_thread import ComputedStep
from ..sessions.answer_queue import Answer, AnswerQueue
from ..sessions.answers import conclude, encode_gap, encode_refusal
from ..sessions.held_session import HeldSession
from ..sessions.large_frames import LargeFrames
from ..sessions.steering import Steering, check_attach, check_epoch, may_push, steer
from ..sessions.step_work import check_step_size, make_work
from .greeting import Greeting
from .learning_desk import LearningDesk, LearningMessage

if TYPE_CHECKING:
    from .service import Service

_logger = logging.getLogger(__name__)

_HELLO_SECONDS = 20.0
"""How long a stream may stay without a session: it costs a stranger nothing to open thousands."""

_STREAMS_PER_SESSION = 4
"""Streams that a peer serves for each session it may hold: a session uses two, and some streams
have none yet. By default far fewer than the listener takes, so that a refusal can be told."""


class Conversation:
    """The state of one stream: a reader and a sender side by side, owned by one task group."""

    def __init__(self, service: Service, stream: Stream) -> None:
        self.holder = Holder(name_holder(stream.remote_host))
        self._service = service
        self._stream = stream
        self._opened: dict[SessionId, HeldSession] = {}
        self._waiting: dict[SessionId, asyncio.Task[bytes]] = {}  # sessions that have to wait
        self._tasks: asyncio.TaskGroup | None = None
        self._attached: dict[SessionId, Capability] = {}  # sessions that another peer pushes here
        self._used: set[SessionId] = set()  # those opened here, and others that are stepped here
        self._answers = AnswerQueue(stream, service.pending, self.holder)
        self._greeting = Greeting(service)
        self._learning = LearningDesk(service, self._answers, self._greeting.understands_signs)
        self._idle_seconds = service.facts.session_idle_seconds
        self._active_at = service.clock.now()
        self._large_frames = LargeFrames(service.pending, service.clock)
        stream.set_gate(self._let_in)

    @property
    def offer(self) -> Offer | None:
        """Who has offered the stream, which has come to its end as a conversation then."""
        return self._greeting.offer

    async def run(self) -> None:
        """Serve until the stream ends. A client that vanishes is nobody's error.

        It does not end the task group by an error either: the tracebacks in it would keep what a
        stream held, some MiB, until the next full garbage collection.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                watching = tasks.create_task(self._stream.wait_over())
                sending = tasks.create_task(self._send_answers())
                reading = tasks.create_task(self._read_questions())
                ends = {reading, sending, watching}
                # As soon as the stream breaks everything ends, whatever it waits for.
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                for waiting in self._waiting.values():
                    waiting.cancel()
                self._learning.prompts.end()  # no more of them come, and answers wait for them
                self._answers.finish()
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                watching.cancel()
        finally:
            self._tasks = None
            self._stream.set_gate(open_gate)
            # What is in the engine still is somewhere in memory: it counts until it is done.
            self._answers.end()
            self._learning.end()
            for session, held in self._opened.items():
                self._service.close_session(session, held)

    def say_leaving(self) -> None:
        """Tell the client of every session here to move it, unless it is too old to understand."""
        if self._greeting.version >= HANDOFF_VERSION:
            for session, held in self._opened.items():
                self._answers.put(encode_frame(Leaving(session, held.state.epoch)))

    async def _send_answers(self) -> None:
        try:
            await self._answers.run()
        except UnavailableError as error:
            _logger.debug("answers do not arrive: %s", error)

    async def _read_questions(self) -> None:
        """Read until the client ends the stream, breaks the protocol or falls silent."""
        try:
            self._join_service()
            while await self._read_question():
                pass
        except RemoteProtocolError as error:
            self._end_stream(RefusedError(ErrorCode.BAD_FRAME, str(error)))
        except RefusedError as error:
            self._end_stream(error)
        except UnavailableError as error:
            _logger.debug("a client went away: %s", error)

    async def _read_question(self) -> bool:
        """Take one frame, which nothing here holds on to; return whether to go on."""
        frame = await self._receive()
        if frame is None:
            return False
        await self._take(decode_frame(frame))
        return self.offer is None

    async def hang_up(self) -> None:
        """End the stream from this side."""
        await self._answers.hang_up()

    def _join_service(self) -> None:
        service = self._service
        if service.has_hung_up:
            raise RefusedError(ErrorCode.DRAINING, "the peer leaves its blocks", BUSY_SECONDS)
        num_places = _STREAMS_PER_SESSION * service.facts.max_sessions
        check_room_for(self.holder.address, service.list_stream_addresses(), num_places, "streams")
        service.streams.add(self)

    async def _receive(self) -> bytes | None:
        """Wait for a frame. Raises RefusedError when nothing was done here for too long."""
        await self._answers.wait_for_room(self._idle_seconds)
        clock = self._service.clock
        while (seconds := self._find_deadline() - clock.now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    frame = await self._stream.receive()
                    self._large_frames.note_received()
                    return frame
        raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the stream was idle for too long")

    def _find_deadline(self) -> float:
        """Return when the stream is idle for too long: what is refused or unknown does not count.

        Sessions opened or stepped here may be stepped on another stream, too.
        """
        sessions, now = self._service.sessions, self._service.clock.now()
        held = [sessions[session] for session in self._used if session in sessions]
        if len(held) < len(self._used):
            self._used &= sessions.keys()
            self._attached = {s: shown for s, shown in self._attached.items() if s in self._used}
            self._active_at = now
        idle_seconds = self._idle_seconds
        if not self._used and not self._waiting:
            idle_seconds = min(idle_seconds, _HELLO_SECONDS)
        active_at = max([self._active_at, self._learning.active_at, *(one.used_at for one in held)])
        return max(active_at + idle_seconds, self._large_frames.find_deadline())

    @contextlib.asynccontextmanager
    async def _let_in(self, num_bytes: int) -> AsyncGenerator[None]:
        """Let a large frame arrive once it is known who sends it."""
        self._greeting.check_is_done()
        async with self._large_frames.let_in(self.holder, num_bytes):
            yield

    def _end_stream(self, error: RefusedError) -> None:
        _logger.info("closing a stream: %s", error)
        self._answers.put(encode_refusal(None, 0, error))

    async def _take(self, message: Message) -> None:
        """Act on one message; a refusal of a session is an answer, of a stream an exception."""
        if isinstance(message, Hello):
            self._welcome(message)
            return
        self._greeting.check_is_done()
        if isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Open):
            await self._open(message)
        elif isinstance(message, LearningMessage):
            self._learning.take(message, self.holder)
        elif isinstance(message, Close):
            self._close(message.session)
        elif isinstance(message, Steering):
            self._answers.put(steer(message, self._opened.get(message.session)))
        elif isinstance(message, Attach):
            self._attach(message)
        elif isinstance(message, Offer) and not self._used and not self._waiting:
            self._greeting.take_offer(message)
        else:
            raise RemoteProtocolError(f"a client does not send {type(message).__name__}")

    def _attach(self, message: Attach) -> None:
        session = message.session
        try:
            check_attach(message, self._service.sessions.get(session))
        except RefusedError as error:
            self._answers.put(encode_refusal(session, 0, error))
        else:
            self._attached[session] = message.capability
            self._used.add(session)

    def _close(self, session: SessionId) -> None:
        waiting = self._waiting.get(session)
        if waiting is not None:
            waiting.cancel()
        if (held := self._opened.pop(session, None)) is not None:
            self._service.close_session(session, held)

    def _welcome(self, hello: Hello) -> None:
        welcome = self._greeting.welcome(hello)
        self._active_at = self._service.clock.now()
        self.holder = self._answers.holder = self.holder._replace(client=hello.client.hex())
        self._answers.put(encode_frame(welcome))

    async def _open(self, message: Open) -> None:
        """Open a session, now or after a wait, or say why not."""
        may_wait = message.max_wait_seconds > 0
        try:
            if message.session in self._waiting:
                raise RefusedError(ErrorCode.BAD_FRAME, "the session waits already")
            if len(self._opened) + len(self._waiting) >= limits.MAX_SESSIONS_PER_STREAM:
                may_wait = False
                raise RefusedError(ErrorCode.BUSY, "too many sessions on one stream", BUSY_SECONDS)
            self._learning.prompts.expect(message, self.holder)
            opened = await self._service.admission.open(message, self.holder, self._answers.post)
        except RefusedError as error:
            seconds = error.retry_after_seconds
            if may_wait and seconds is not None and self._service.admission.may_wait(self.holder):
                self._wait_for_session(message, seconds)
            else:
                self._learning.prompts.refuse(message.session)
                self._answers.put(encode_refusal(message.session, 0, error))
        else:
            self._learning.prompts.answer(
                message.session, opened[0], self._note_opened(message, *opened)
            )

    def _wait_for_session(self, message: Open, seconds: float) -> None:
        """Leave a session that has to wait to a task, and say about how long that takes."""

        async def wait() -> bytes:
            try:
                opened = await self._service.admission.wait(
                    message, self.holder, self._answers.post
                )
            except RefusedError as error:
                self._learning.prompts.refuse(message.session)
                return encode_refusal(message.session, 0, error)
            frame = self._note_opened(message, *opened)
            return await self._learning.prompts.wait(message.session, opened[0], frame)

        def settle(task: asyncio.Task[bytes]) -> None:
            del self._waiting[message.session]
            is_known = not task.cancelled() and task.exception() is None
            self._answers.deliver(answer, task.result() if is_known else None)

        assert self._tasks is not None
        answer: Answer = asyncio.Future()
        self._active_at = self._service.clock.now()
        self._waiting[message.session] = task = self._tasks.create_task(wait())
        task.add_done_callback(settle)
        self._answers.put(encode_frame(Queued(message.session, message.epoch, seconds)))
        self._answers.put(answer)

    def _note_opened(self, message: Open, held: HeldSession, free_tokens: int) -> bytes:
        self._opened[message.session] = held
        self._used.add(message.session)
        self._active_at = self._service.clock.now()
        queue_seconds = self._service.compute.queue_seconds
        return encode_frame(Opened(message.session, message.epoch, queue_seconds, free_tokens))

    def _take_step(self, step: Step) -> None:
        held = self._find_session(step.session)
        try:
            if held is None:
                raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the session is not open here")
            if held.capability and self.holder != held.holder:
                check_epoch(step, held)
            decision = held.state.decide(step)
            if decision.action in (Action.EXECUTE, Action.ROLLBACK):
                self._check_size(step, held)
        except RefusedError as error:
            self._answer(held, encode_refusal(step.session, step.sequence, error))
            return
        if decision.action is Action.RESEND:
            self._answer(held, decision.answer)
        elif decision.action is Action.GAP:
            self._answer(held, encode_gap(step, held))
        elif decision.action in (Action.EXECUTE, Action.ROLLBACK):
            held.used_at = self._service.clock.now()
            held.cache.touch()
            held.state.accept(step)
            self._used.add(step.session)
            answer: Answer | None = None if held.capability else asyncio.Future()
            self._count_step(held, answer, len(step.hidden.data))
            work = make_work(step, held)
            future = self._service.compute.submit(work, held.holder)
            held.running.add(future)
            future.add_done_callback(partial(self._settle, step, held, answer))
            if answer is not None:
                self._answers.put(answer)

    def _find_session(self, session: SessionId) -> HeldSession | None:
        """Return a session that may be stepped on this stream."""
        held = self._service.sessions.get(session)
        if held is None or not held.capability or session in self._opened:
            return held
        return held if may_push(self._attached.get(session, NO_CAPABILITY), held) else None

    def _answer(self, held: HeldSession | None, frame: bytes) -> None:
        """Answer a step: here, or, what is part of a chain, on the stream of its client."""
        if held is not None and held.capability:
            held.outlet.post(frame)
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
        held.running.discard(future)
        frame = None if future.cancelled() else conclude(step, held, future)
        if answer is not None:
            self._answers.deliver(answer, frame)
        elif frame is not None:
            held.outlet.post(frame)
        num_bytes = len(step.hidden.data)
        if not future.cancelled():
            self._count_step(held, answer, -num_bytes)
            return
        # The engine may be at it still, and has it in its queue until the next iteration.
        dropped = self._service.compute.call(bool)
        dropped.add_done_callback(lambda _: self._count_step(held, answer, -num_bytes))

    def _count_step(self, held: HeldSession, answer: Answer | None, num_bytes: int) -> None:
        """Count a step that waits for the engine: one that is pushed holds up no other session."""
        if answer is None:
            self._service.pending.count(held.holder, num_bytes)
        else:
            self._answers.count(num_bytes)

    def _check_size(self, step: Step, held: HeldSession) -> None:
        is_pushed = held.outlet.next is not None
        check_step_size(step, held.dtype, self._service.engine.spec.hidden_size, is_pushed)
        holder = held.holder if held.capability else self.holder
        self._service.pending.check_room_for(holder, len(step.hidden.data))
