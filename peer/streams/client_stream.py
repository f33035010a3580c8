"""One stream of a client, or of a peer that pushes: messages in, work of all kinds, answers out.

A stream answers Hello, keeps time limits, reserves memory for large frames, and hands each
message to the work that takes its type; it sends the answers in the order of their questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ...kernels.wire_tensors import has_only_finite
from ...protocol import limits
from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
)
from ...protocol.fair_share import BUSY_SECONDS, Tenant, name_address
from ...protocol.ids import OFFER_NONCE_BYTES, SessionId
from ...protocol.messages.codec import decode_frame, encode_frame
from ...protocol.messages.fields import Message
from ...protocol.messages.reverse_connections import Offer
from ...protocol.messages.session import Declined, Hello, Queued, Welcome
from ...protocol.net.transport import Stream, open_gate
from ...protocol.tensors import WireDtype
from ...protocol.versions import REVERSE_VERSION, SOFTWARE, agree_on_version
from .stream_host import PendingBytes, ServiceCounts, StreamHost

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_HELLO_SECONDS = 20.0
"""How long a stream may stay without a session: it costs a stranger nothing to open thousands."""

_ROOM_SECONDS = 30.0
"""How long a large frame that has begun to arrive may wait for room: its sender waits as well."""

_LARGE_FRAME_SECONDS = 1.0
"""How long a stream counts as busy after a large frame arrived, or did not."""

_LOOK_SECONDS = 5.0
"""How often a stream looks whether it is idle, at least."""

_MAX_PENDING_ANSWERS = 16
"""Questions of one stream that wait for their answer; more are not read until one is sent."""

MAX_STREAM_PENDING_BYTES = 2 * limits.MAX_FRAME_BYTES
"""Steps of one stream that wait for the engine, and answers that wait to be sent; no more is read
until there are less."""

_KEEP_ALIVE_SECONDS = 1.0

_SEND_SECONDS = 30.0
_SENT_BYTES_PER_SECOND = 64 * 2**10
"""How long a frame may take to leave, and as long as its bytes take over a slow line: 5 minutes for
the largest. A client that reads less has gone, or wants the memory that its answers take, which
counts as its own."""

_FRAME_MICROSECONDS = 40
"""Fixed cost of a frame on top of the measured time: it wakes a task and may be answered."""

_BYTES_PER_MICROSECOND = 1000
"""What TLS and copies have done with a frame before it is taken."""

_TIMES_USELESS = 4
"""So many times as much is charged for a frame by which nothing was begun or came further."""

Answer = asyncio.Future[bytes | None]
"""The answer to a step, which is not known yet; None when there is none in the end."""

Handler = Callable[[Any], Awaitable[None] | bool | None]
"""Takes a message of one type. False: it belongs to other work that takes this type as well.

Its errors end the stream: RefusedError and RemoteProtocolError with an answer that says why.
"""


class StreamWork(Protocol):
    """One kind of work on one stream. Derive from it for what is not written out below."""

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """The handler of each message type. Those of all workloads make one table."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether something is under way for which the client has to wait."""
        return False

    @property
    def active_at(self) -> float:
        """When something was last done, by the peer's clock, without `ClientStream.touch`."""
        return -math.inf

    @property
    def is_in_use(self) -> bool:
        """Whether the client may well be silent for long: without it the stream ends soon."""
        return False

    def stop(self) -> None:
        """Stop waiting for the client: give up answers that depend on it."""

    def end(self) -> None:
        """Free everything: the stream has ended."""


class ClientStream:
    """The state of one stream: a reader and a sender side by side, owned by one task group."""

    def __init__(
        self,
        host: StreamHost,
        stream: Stream,
        accept: Sequence[Callable[[ClientStream], StreamWork]],
        register: Callable[[ClientStream], None],
        first_frame: bytes | None = None,
    ) -> None:
        """`accept` makes what takes the messages. `register` is called before the first of them;
        it raises RefusedError where there are too many streams. `first_frame`: has come already.
        """
        self._first_frame = first_frame
        self.offer: Offer | None = None
        """The other end offers the stream, of which nothing more is read here then."""
        self.version = 0
        """The protocol version that both ends speak; 0 until Hello was said."""
        tenant = Tenant(name_address(stream.remote_host))
        self.answers = AnswerQueue(stream, host.pending, tenant, host.counts)
        self._host = host
        self._stream = stream
        self._register = register
        self._tasks: asyncio.TaskGroup | None = None
        self._works = [make(self) for make in accept]
        self._handlers: dict[type[Message], list[Handler]] = {}
        for work in self._works:
            for kind, handler in work.handlers.items():
                self._handlers.setdefault(kind, []).append(handler)
        self.nonce = b""
        """What our Welcome has said, for the other end to sign."""
        self._active_at = host.clock.now()
        self._is_busy = False  # with a message, or with others, so that nothing is read
        self._large_frame_until = 0.0
        stream.set_gate(self._let_in)

    @property
    def tenant(self) -> Tenant:
        """The tenant against whom the stream's bytes and work are counted."""
        return self.answers.tenant

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Do something that ends with the stream."""
        assert self._tasks is not None  # messages come only while the stream is served
        return self._tasks.create_task(work)

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
                idling = tasks.create_task(self._wait_until_idle())
                ends = {reading, sending, watching, idling}
                # As soon as the stream breaks everything ends, whatever it waits for.
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                idling.cancel()
                for work in self._works:
                    work.stop()
                self.answers.finish()
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                watching.cancel()
        finally:
            self._tasks = None
            self._stream.set_gate(open_gate)
            # Steps in the engine still take memory: they count until they are done.
            self.answers.end()
            for work in self._works:
                work.end()
            # They refer to the stream: what it held is freed without a garbage collection.
            self._works.clear()
            self._handlers.clear()

    async def hang_up(self) -> None:
        """End the stream from this side."""
        await self.answers.hang_up()

    def touch(self) -> None:
        """Note that something was begun here, came further or is over.

        A stream ends on which nothing was done for long.
        """
        self._active_at = self._host.clock.now()

    async def _send_answers(self) -> None:
        try:
            await self.answers.run()
        except UnavailableError as error:
            _logger.debug("a client does not receive its answers: %s", error)

    async def _read_questions(self) -> None:
        """Read until the client ends the stream or breaks the protocol."""
        try:
            self._register(self)
            while await self._read_question():
                pass
        except RemoteProtocolError as error:
            self._refuse(RefusedError(ErrorCode.BAD_FRAME, str(error)))
        except RefusedError as error:
            self._refuse(error)
        except SilentError as error:  # its line may be slow: that is no fault of ours, nor a lie
            self._refuse(RefusedError(ErrorCode.BUSY, str(error), BUSY_SECONDS))
        except UnavailableError as error:
            _logger.debug("a client disconnected: %s", error)

    async def _read_question(self) -> bool:
        """Take one frame, which nothing here holds on to; return whether to go on."""
        if self.answers.is_full:
            await self._wait_for_room()
        frame, self._first_frame = self._first_frame, None
        if frame is None:
            frame = await self._stream.receive()
        self._large_frame_until = 0.0
        if frame is None:
            return False
        if self._host.turns.must_wait(self.tenant):
            await self._wait_for_turn(len(frame))
        began_at = self._host.clock.now()
        microseconds = _FRAME_MICROSECONDS + len(frame) // _BYTES_PER_MICROSECOND
        message = decode_frame(frame)
        self._host.counts.note_received(frame)
        outcome = self._take(message)
        del frame, message
        seconds = self._host.clock.now() - began_at
        is_useful = outcome is not None or self._active_at >= began_at
        microseconds += int(1e6 * seconds)
        self._host.turns.charge(self.tenant, microseconds * (1 if is_useful else _TIMES_USELESS))
        if outcome is not None:
            with self._being_busy():
                await outcome
        return self.offer is None

    async def _wait_for_turn(self, num_bytes: int) -> None:
        """Wait until the frames of others were taken; the one in hand counts meanwhile."""
        tenant, pending = self.tenant, self._host.pending
        pending.count(tenant, num_bytes)
        try:
            await self._host.turns.wait(tenant)
        finally:
            pending.count(tenant, -num_bytes)

    async def _wait_for_room(self) -> None:
        """Wait until more may be asked. Raises RefusedError when that takes too long."""
        with self._being_busy():
            await self.answers.wait_for_room(self._host.idle_seconds)
        self.touch()

    async def _wait_until_idle(self) -> None:
        """Wait until nothing was done here for too long, and say that."""
        seconds = self._find_seconds_left()
        while seconds > 0:
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))
            seconds = self._find_seconds_left()
        self._refuse(RefusedError(ErrorCode.UNKNOWN_SESSION, "the stream was idle for too long"))

    def _find_seconds_left(self) -> float:
        """Return after how long the stream will have been idle for too long.

        Refused and unknown messages do not count. A large frame that arrives does: the transport
        has a limit of its own for it.
        """
        if self._is_busy or any(work.is_busy for work in self._works):
            return math.inf
        idle_seconds = self._host.idle_seconds
        if not any(work.is_in_use for work in self._works):
            idle_seconds = min(idle_seconds, _HELLO_SECONDS)
        active_at = max([self._active_at, *(work.active_at for work in self._works)])
        return max(active_at + idle_seconds, self._large_frame_until) - self._host.clock.now()

    @contextlib.asynccontextmanager
    async def _let_in(self, num_bytes: int) -> AsyncGenerator[None]:
        """Admit a large frame once its sender is known and there is room for it."""
        self._check_greeted()
        tenant, pending = self.tenant, self._host.pending
        self._large_frame_until = math.inf
        try:
            await pending.wait_for_room(tenant, num_bytes, _ROOM_SECONDS)
            pending.count(tenant, num_bytes)
            try:
                yield
            finally:
                pending.count(tenant, -num_bytes)
        finally:
            self._large_frame_until = self._host.clock.now() + _LARGE_FRAME_SECONDS

    @contextlib.contextmanager
    def _being_busy(self) -> Generator[None]:
        """Do not count the time as idle."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _refuse(self, error: RefusedError) -> None:
        _logger.info("closing a client's stream: %s", error)
        self.answers.refuse(None, error)

    def _take(self, message: Message) -> Awaitable[None] | None:
        """Act on one message; a refusal of a session is an answer, of a stream an exception.

        Returns what is left to do before the next message, if anything is.
        """
        if isinstance(message, Hello):
            self._welcome(message)
            return None
        self._check_greeted()
        for handle in self._handlers.get(type(message), ()):
            outcome = handle(message)
            if outcome is not False:
                return None if isinstance(outcome, bool) else outcome
        if isinstance(message, Offer) and not any(work.is_in_use for work in self._works):
            self._take_offer(message)
        elif type(message) not in self._handlers:  # else it belongs to what was refused or is over
            raise RemoteProtocolError(f"a client does not send {type(message).__name__}")
        return None

    def _check_greeted(self) -> None:
        if not self.version:
            raise RefusedError(ErrorCode.BAD_FRAME, "the first message of a stream must be Hello")

    def _welcome(self, hello: Hello) -> None:
        """Answer Hello. Raises RefusedError where no version fits."""
        if self.version:  # bytes count under the first name, and time passes
            raise RemoteProtocolError("Hello may be sent once per stream")
        host = self._host
        self.version = agree_on_version(hello.min_version, hello.max_version)
        if self.version >= REVERSE_VERSION and (host.parked is not None or host.knows_members):
            self.nonce = secrets.token_bytes(OFFER_NONCE_BYTES)
        self.touch()
        self.answers.tenant = self.answers.tenant._replace(client=hello.client.hex())
        wall = host.clock.wall()
        welcome = Welcome(
            self.version, SOFTWARE, host.peer_id, host.model_id, host.span, wall, self.nonce
        )
        self.answers.say(welcome)

    def _take_offer(self, offer: Offer) -> None:
        """Note that the other end offers the stream. Raises RemoteProtocolError unless that was
        asked for, and the other end is who it says it is.
        """
        parked = self._host.parked
        if parked is None or not self.nonce:
            raise RemoteProtocolError("this stream does not accept offers")
        parked.check(offer, self.nonce)
        self.offer = offer


class AnswerQueue:
    """Answers in the order of their questions. What waits counts against the `tenant`."""

    def __init__(
        self, stream: Stream, pending: PendingBytes, tenant: Tenant, counts: ServiceCounts
    ) -> None:
        self.tenant = tenant
        self._counts = counts
        self._stream = stream
        self._pending = pending
        self._queue: asyncio.Queue[bytes | Answer | Callable[[], None] | None] = asyncio.Queue()
        self._pending_bytes = 0
        self._unsent_bytes = 0  # those of them that are computed
        self._has_ended = False
        self._has_hung_up = False
        self._room = asyncio.Event()

    def put(self, answer: bytes | Answer) -> None:
        """Queue an answer, or the place of one."""
        self._queue.put_nowait(answer)

    def refuse(self, session: SessionId | None, error: RefusedError) -> None:
        """Queue the refusal of a session, or of the stream."""
        self.put(encode_refusal(session, 0, error, self._counts))

    def say(self, message: Message) -> None:
        """Queue a message."""
        self.put(encode_frame(message))

    def put_mark(self, note_sent: Callable[[], None]) -> None:
        """Have something called as soon as everything that is queued by now was sent."""
        self._queue.put_nowait(note_sent)

    def post(self, frame: bytes) -> None:
        """Queue something that was not asked on this stream."""
        answer: Answer = asyncio.Future()
        self.put(answer)
        self.deliver(answer, frame)

    def deliver(self, answer: Answer, frame: bytes | None) -> None:
        """Fill the place of an answer; the frame counts until it is sent."""
        if frame is not None and not self._has_ended:
            self._count_unsent(len(frame))
        answer.set_result(frame)

    def count(self, num_bytes: int) -> None:
        """Count what waits for the engine, or no longer does."""
        self._pending_bytes += num_bytes
        self._pending.count(self.tenant, num_bytes)
        self._room.set()

    @property
    def is_full(self) -> bool:
        """Whether no more may be asked at present."""
        return (
            self._pending_bytes > MAX_STREAM_PENDING_BYTES
            or self._queue.qsize() >= _MAX_PENDING_ANSWERS
        )

    async def wait_for_room(self, seconds: float) -> None:
        """Wait until more may be asked. Raises RefusedError after so long."""
        try:
            async with asyncio.timeout(seconds):
                while self.is_full:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError as error:
            detail = f"the engine computed nothing for {seconds:.0f} s"
            raise RefusedError(ErrorCode.BUSY, detail, BUSY_SECONDS) from error

    async def run(self) -> None:
        """Send answers until `finish`. Raises UnavailableError when nobody reads them."""
        while await self._send_next():
            pass

    def finish(self) -> None:
        """Let `run` end behind the answers that are queued."""
        self._queue.put_nowait(None)

    async def hang_up(self) -> None:
        """Close the stream; what is not sent by now is not missed."""
        self._has_hung_up = True
        await self._stream.close()

    def end(self) -> None:
        """Count nothing more as unsent: the stream is over."""
        self._has_ended = True
        self.count(-self._unsent_bytes)

    async def _send_next(self) -> bool:
        """Send one answer, which nothing here holds on to; return whether there was one."""
        answer = await self._queue.get()
        self._room.set()
        if answer is None:
            return False
        if isinstance(answer, bytes):
            await self._send(answer)
            return True
        if not isinstance(answer, asyncio.Future):
            answer()
            return True
        await asyncio.wait([answer])
        frame = answer.result()
        if frame is not None:
            await self._send(frame)
            self._count_unsent(-len(frame))
        return True

    async def _send(self, frame: bytes) -> None:
        """Send a frame; a client that never reads is one that went away."""
        if self._has_hung_up:
            raise UnavailableError("the stream was closed here")
        try:
            seconds = _SEND_SECONDS + len(frame) / _SENT_BYTES_PER_SECOND
            async with asyncio.timeout(seconds):
                await self._stream.send(frame)
                self._counts.note_sent(frame)
        except TimeoutError as error:
            raise UnavailableError("the client does not read its answers") from error

    def _count_unsent(self, num_bytes: int) -> None:
        self._unsent_bytes += num_bytes
        self.count(num_bytes)


class KeepAlive:
    """Tells a client every second that one request of a stream is still under way."""

    def __init__(self, answers: AnswerQueue, estimate_seconds: Callable[[], float | None]) -> None:
        """Where the estimate is None, nothing is said: the client is to take us for silent."""
        self._answers = answers
        self._estimate_seconds = estimate_seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, question: SessionId) -> None:
        """Say so now, and again until `stop`."""
        self.stop()
        seconds = self._estimate_seconds()
        if seconds is not None:
            self._answers.say(Queued(question, 0, seconds))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_KEEP_ALIVE_SECONDS, self.begin, question)

    def stop(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def encode_refusal(
    session: SessionId | None, sequence: int, error: RefusedError, counts: ServiceCounts
) -> bytes:
    """Return the frame that refuses a step, a session (sequence 0) or the stream (no session).

    The refusal is counted.
    """
    counts.refusals[error.code] += 1
    return encode_frame(
        Declined(session, sequence, error.code, str(error), error.retry_after_seconds)
    )


def check_fits(hidden: Tensor, dtype: WireDtype) -> None:
    """Raise RefusedError when a dtype of the wire cannot hold these numbers."""
    if dtype is WireDtype.FP16 and not has_only_finite(hidden.half()):
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            "these hidden states are too large for fp16 on the wire; choose bf16 or fp32",
        )
