"""One stream of a client, or of a peer that pushes: messages in, work of all kinds, answers out.

What a stream does for everybody is here: Hello, time limits, memory for large frames, and handing
each message to the workload that takes its type. Answers leave in the order of their questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.fair_share import Holder, name_holder
from ...protocol.ids import OFFER_NONCE_BYTES, ModelId, PeerId
from ...protocol.messages.fields import Message
from ...protocol.messages.offers import Offer
from ...protocol.messages.session import Hello, Welcome
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Stream, open_gate
from ...protocol.spans import Span
from ...protocol.versions import REVERSE_VERSION, SOFTWARE, agree_on_version
from ...protocol.wire.codec import decode_frame
from ..accounts.shared_bytes import SharedBytes
from ..pushing.parked_streams import ParkedStreams
from .answer_queue import AnswerQueue, encode_refusal
from .workload import ClientStream, Handler, Workload

_logger = logging.getLogger(__name__)

_HELLO_SECONDS = 20.0
"""How long a stream may stay without a session: it costs a stranger nothing to open thousands."""

_ROOM_SECONDS = 30.0
"""How long a large frame that has begun to arrive may wait for room: its sender waits as well."""

_LOOK_AGAIN_SECONDS = 1.0
"""How soon to ask again whether a stream is idle on which a large frame is on its way."""


@dataclass(frozen=True)
class StreamHost:
    """Resources that all streams of a peer share while it serves one span."""

    peer_id: PeerId
    model_id: ModelId
    span: Span
    clock: Clock
    idle_seconds: float
    """A stream is closed on which nothing is done for so long."""
    pending: SharedBytes
    """Memory for frames that arrive in pieces, steps that wait, and answers that do."""
    parked: ParkedStreams | None
    """Keeps the streams that are offered; None where none are taken."""


class Conversation:
    """The state of one stream: a reader and a sender side by side, owned by one task group."""

    def __init__(
        self,
        host: StreamHost,
        stream: Stream,
        workloads: Sequence[Workload],
        register: Callable[[Conversation], None],
    ) -> None:
        """`register` is called first; it raises RefusedError where there are too many streams."""
        self.offer: Offer | None = None
        """The other end offers the stream, which has come to its end as a conversation then."""
        self._host = host
        self._stream = stream
        self._register = register
        self._answers = AnswerQueue(stream, host.pending, Holder(name_holder(stream.remote_host)))
        self._context = ClientStream(self._answers)
        self._works = [workload.attend(self._context) for workload in workloads]
        self._handlers: dict[type[Message], list[Handler]] = {}
        for work in self._works:
            for kind, handler in work.handlers.items():
                self._handlers.setdefault(kind, []).append(handler)
        self._nonce = b""
        self._active_at = host.clock.now()
        self._large_frame_until = 0.0
        stream.set_gate(self._let_in)

    @property
    def holder(self) -> Holder:
        """Whom the stream is counted against."""
        return self._answers.holder

    async def run(self) -> None:
        """Serve until the stream ends. A client that vanishes is nobody's error.

        It does not end the task group by an error either: the tracebacks in it would keep what a
        stream held, some MiB, until the next full garbage collection.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._context.tasks = tasks
                watching = tasks.create_task(self._stream.wait_over())
                sending = tasks.create_task(self._send_answers())
                reading = tasks.create_task(self._read_questions())
                ends = {reading, sending, watching}
                # As soon as the stream breaks everything ends, whatever it waits for.
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                for work in self._works:
                    work.stop()
                self._answers.finish()
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                watching.cancel()
        finally:
            self._context.tasks = None
            self._stream.set_gate(open_gate)
            # What is in the engine still is somewhere in memory: it counts until it is done.
            self._answers.end()
            for work in self._works:
                work.end()

    async def hang_up(self) -> None:
        """End the stream from this side."""
        await self._answers.hang_up()

    async def _send_answers(self) -> None:
        try:
            await self._answers.run()
        except UnavailableError as error:
            _logger.debug("a client does not receive its answers: %s", error)

    async def _read_questions(self) -> None:
        """Read until the client ends the stream, breaks the protocol or falls silent."""
        try:
            self._register(self)
            while await self._read_question():
                pass
        except RemoteProtocolError as error:
            self._end_stream(RefusedError(ErrorCode.BAD_FRAME, str(error)))
        except RefusedError as error:
            self._end_stream(error)
        except UnavailableError as error:
            _logger.debug("a client disconnected: %s", error)

    async def _read_question(self) -> bool:
        """Take one frame, which nothing here holds on to; return whether to go on."""
        frame = await self._receive()
        if frame is None:
            return False
        await self._take(decode_frame(frame))
        return self.offer is None

    async def _receive(self) -> bytes | None:
        """Wait for a frame. Raises RefusedError when nothing was done here for too long."""
        await self._answers.wait_for_room(self._host.idle_seconds)
        clock = self._host.clock
        while (seconds := self._find_deadline() - clock.now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    frame = await self._stream.receive()
                    self._large_frame_until = 0.0
                    return frame
        raise RefusedError(ErrorCode.UNKNOWN_SESSION, "the stream was idle for too long")

    def _find_deadline(self) -> float:
        """Return when the stream has been idle for too long.

        What is refused or unknown does not count.
        """
        idle_seconds = self._host.idle_seconds
        if not any(work.is_in_use for work in self._works):
            idle_seconds = min(idle_seconds, _HELLO_SECONDS)
        active_at = max([self._active_at, *(work.active_at for work in self._works)])
        # Not while a large frame arrives, for which the transport has a limit of its own.
        soon = self._host.clock.now() + _LOOK_AGAIN_SECONDS
        return max(active_at + idle_seconds, min(self._large_frame_until, soon))

    @contextlib.asynccontextmanager
    async def _let_in(self, num_bytes: int) -> AsyncGenerator[None]:
        """Let a large frame arrive once it is known who sends it, and there is room for it."""
        self._check_greeted()
        holder, pending = self.holder, self._host.pending
        self._large_frame_until = math.inf
        try:
            await pending.wait_for_room(holder, num_bytes, _ROOM_SECONDS)
            pending.count(holder, num_bytes)
            try:
                yield
            finally:
                pending.count(holder, -num_bytes)
        finally:
            self._large_frame_until = self._host.clock.now() + _LOOK_AGAIN_SECONDS

    def _end_stream(self, error: RefusedError) -> None:
        _logger.info("closing a client's stream: %s", error)
        self._answers.put(encode_refusal(None, 0, error))

    async def _take(self, message: Message) -> None:
        """Act on one message; a refusal of a session is an answer, of a stream an exception."""
        if isinstance(message, Hello):
            self._welcome(message)
            return
        self._check_greeted()
        for handle in self._handlers.get(type(message), ()):
            outcome = handle(message)
            if isinstance(outcome, bool):
                if outcome:
                    return
                continue
            if outcome is not None:
                await outcome
            return
        if isinstance(message, Offer) and not any(work.is_in_use for work in self._works):
            self._take_offer(message)
            return
        raise RemoteProtocolError(f"a client does not send {type(message).__name__}")

    def _check_greeted(self) -> None:
        if not self._context.version:
            raise RefusedError(ErrorCode.BAD_FRAME, "the first message of a stream must be Hello")

    def _welcome(self, hello: Hello) -> None:
        """Answer Hello. Raises RefusedError where no version fits."""
        if self._context.version:  # bytes count under the first name, and time passes
            raise RemoteProtocolError("Hello may be sent once per stream")
        host = self._host
        version = agree_on_version(hello.min_version, hello.max_version)
        self._context.version = version
        if version >= REVERSE_VERSION and host.parked is not None:
            self._nonce = secrets.token_bytes(OFFER_NONCE_BYTES)
        self._active_at = host.clock.now()
        self._answers.holder = self._answers.holder._replace(client=hello.client.hex())
        wall = host.clock.wall()
        welcome = Welcome(
            version, SOFTWARE, host.peer_id, host.model_id, host.span, wall, self._nonce
        )
        self._answers.say(welcome)

    def _take_offer(self, offer: Offer) -> None:
        """Note that the other end offers the stream. Raises RemoteProtocolError unless that was
        asked for, and the other end is who it says it is.
        """
        parked = self._host.parked
        if parked is None or not self._nonce:
            raise RemoteProtocolError("this stream does not accept offers")
        parked.check(offer, self._nonce)
        self.offer = offer
