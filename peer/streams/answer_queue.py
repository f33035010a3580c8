"""The answers of one stream on their way to whoever asked, and the memory that they take."""

import asyncio
from collections.abc import Callable

from torch import Tensor

from ...kernels.wire_tensors import has_only_finite
from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError, UnavailableError
from ...protocol.fair_share import BUSY_SECONDS, Holder
from ...protocol.ids import SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.session import Declined
from ...protocol.net.transport import Stream
from ...protocol.tensors import WireDtype
from ...protocol.wire.codec import encode_frame
from ..accounts.shared_bytes import SharedBytes

_MAX_PENDING_ANSWERS = 16
"""Questions of one stream that wait for their answer; more are not read until one is sent."""

_MAX_STREAM_PENDING_BYTES = 2 * limits.MAX_FRAME_BYTES
"""Steps of one stream that wait for the engine, and answers that wait to be sent; no more is read
until there are less."""

_SEND_SECONDS = 30.0
"""How long a frame may take to leave: the largest one needs 27 seconds at 5 megabits a second. A
client that reads less has gone, or wants the memory that its answers take."""

Answer = asyncio.Future[bytes | None]
"""The answer to a step, which is not known yet; None when there is none in the end."""


class AnswerQueue:
    """Answers in the order of their questions. What waits counts against the `holder`."""

    def __init__(self, stream: Stream, pending: SharedBytes, holder: Holder) -> None:
        self.holder = holder
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
        self._pending.count(self.holder, num_bytes)
        self._room.set()

    async def wait_for_room(self, seconds: float) -> None:
        """Wait until more may be asked. Raises RefusedError after so long."""
        try:
            async with asyncio.timeout(seconds):
                while (
                    self._pending_bytes > _MAX_STREAM_PENDING_BYTES
                    or self._queue.qsize() >= _MAX_PENDING_ANSWERS
                ):
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
            async with asyncio.timeout(_SEND_SECONDS):
                await self._stream.send(frame)
        except TimeoutError as error:
            raise UnavailableError("the client does not read its answers") from error

    def _count_unsent(self, num_bytes: int) -> None:
        self._unsent_bytes += num_bytes
        self.count(num_bytes)


def encode_refusal(session: SessionId | None, sequence: int, error: RefusedError) -> bytes:
    """Return the frame that refuses a step, a session (sequence 0) or the stream (no session)."""
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
