"""One hop of one session on the wire: open it, ask one step at a time, check what comes back."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from ...protocol import versions
from ...protocol.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    ShoalError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import NO_CAPABILITY, ClientToken, ModelId
from ...protocol.limits import MAX_FRAME_BYTES
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import PassPiece
from ...protocol.messages.session import (
    Attach,
    Close,
    Gap,
    Leaving,
    Open,
    Opened,
    Output,
    Queued,
    Step,
    Welcome,
)
from ...protocol.net.clock import Clock
from ...protocol.net.dialling import (
    Lane,
    StaleAnnouncementError,
    check_answer,
    choose_lane,
    dial,
    greet,
    receive,
)
from ...protocol.net.transport import Stream, Transport
from ...protocol.wire.codec import decode_frame, encode_frame
from ..routing.deadlines import WakefulTimeout
from ..routing.router import Hop
from ..trace.trace import QuestionWatch
from .mailbox import Mailbox

_GOODBYE_SECONDS = 1.0
"""How long saying Close may take: a stream that is stuck is hung up on without."""


_MAX_UNREAD = 16
"""Messages of a peer that nobody has read yet. It is asked one question at a time."""


@dataclass(frozen=True)
class LinkFacts:
    """What was learned while opening."""

    rtt_seconds: float
    queue_seconds: float
    free_kv_tokens: int


class HopLink:
    """An open session at one peer. Not to be used again after an error: close it."""

    def __init__(
        self, transport: Transport, clock: Clock, hop: Hop, opening: Open, client: ClientToken,
        stream: Stream,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._clock = clock
        self._opening = opening
        self._client = client
        self._interactive = stream
        self._bulk: Stream | None = None
        self._bulk_capability = NO_CAPABILITY  # the one that was shown there
        self._listening: asyncio.Task[None] | None = None
        self._mailbox: Mailbox | None = None
        self._answers: asyncio.Queue[tuple[Message, int] | ShoalError] = asyncio.Queue()
        self._unread_bytes = 0
        self._sending = asyncio.Lock()
        self.is_leaving = False  # its peer will stop soon, and serves until then
        self.on_leaving: Callable[[], None] = _do_nothing
        self.capability = opening.capability
        self.hop = hop
        self.session = opening.session
        self.name = f"peer …{hop.peer.peer_id[-6:]} (blocks {hop.span})"

    def __repr__(self) -> str:
        return f"<HopLink {self.name}>"

    @classmethod
    async def open(
        cls, transport: Transport, clock: Clock, hop: Hop, opening: Open, client: ClientToken,
        timeout_seconds: float, on_queued: Callable[[float], None] = lambda seconds: None,
        prompts: Sequence[PassPiece] = (),
    ) -> tuple["HopLink", LinkFacts]:  # fmt: skip
        """Dial a peer and open a session for the hop's span, under the name of `client`.

        Its deep `prompts` follow. A peer without room may take as long as `opening` allows;
        `on_queued` gets its estimate in seconds. Raises UnavailableError (StaleAnnouncementError
        where the peer is not what it announced), RefusedError or RemoteProtocolError; nothing is
        left open then.
        """
        opening = replace(opening, span=hop.span)
        async with AsyncExitStack() as undo:
            try:
                async with WakefulTimeout(timeout_seconds) as timeout:
                    stream = await _dial(transport, hop, timeout_seconds)
                    undo.push_async_callback(stream.close)
                    link = cls(transport, clock, hop, opening, client, stream)
                    welcome, rtt_seconds = await greet(stream, link.name, clock, client, opening)
                    check_welcome(welcome, hop, opening.model_id)
                    for piece in prompts:
                        await stream.send(encode_frame(piece))
                    opened = await receive(stream, link.name, opening.session)
                    if isinstance(opened, Queued) and opening.max_wait_seconds > 0:
                        on_queued(opened.wait_seconds)
                        timeout.restart(opening.max_wait_seconds + timeout_seconds)
                        opened = await receive(stream, link.name, opening.session)
            except TimeoutError as error:
                name = f"peer …{hop.peer.peer_id[-6:]} (blocks {hop.span})"
                raise SilentError(f"{name} did not open a session in time") from error
            if not isinstance(opened, Opened) or opened.session != opening.session:
                raise RemoteProtocolError(f"{link.name} answered Open with {opened!r:.80}")
            undo.pop_all()
            return link, LinkFacts(rtt_seconds, opened.queue_seconds, opened.free_kv_tokens)

    async def step(
        self,
        step: Step,
        timeout_seconds: float,
        carrying_seconds: float = 0.0,
        watch: QuestionWatch | None = None,
    ) -> Output:
        """Ask one step and return its checked answer; `watch` hears when the frames go and come.

        The timeout begins when the transport has taken the step; what it has still to carry then,
        and the answer, may take `carrying_seconds` more. Raises SilentError after that,
        UnavailableError when the stream broke or the peer lost the prefix, RefusedError when the
        peer declined, RemoteProtocolError when its answer does not fit the question.
        """
        frame = encode_frame(step)
        if watch is not None:
            watch.note_encoded(len(frame))
        try:
            async with WakefulTimeout(timeout_seconds + carrying_seconds) as timeout:
                stream = await self._choose_stream(choose_lane(step, len(frame)))
                await stream.send(frame)
                timeout.restart(timeout_seconds + carrying_seconds)
                on_frame = _ignore if watch is None else watch.note_arrived
                answer = await self._receive_answer(stream, on_frame)
        except TimeoutError as error:
            raise SilentError(
                f"{self.name} did not answer within {timeout_seconds + carrying_seconds:.1f} s"
            ) from error
        if isinstance(answer, Gap):
            raise UnavailableError(f"{self.name} lost the prefix of the session")
        return self.check_output(step, answer)

    def listen(self, mailbox: Mailbox | None = None) -> None:
        """Hear everything that the peer says from now on, until `close`, also between questions.

        It goes into a mailbox, from now on into another one if there was one; where there is none,
        `step` finds its answers.
        """
        self._mailbox = mailbox
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name=f"hearing {self.name}")

    async def _listen(self) -> None:
        error: ShoalError = UnavailableError(f"{self.name} ended the stream")
        try:
            while (frame := await self._interactive.receive()) is not None:
                self._hear(decode_frame(frame), len(frame))
        except ShoalError as failure:
            error = failure
        self.is_leaving = False  # it has left, and the next step will find that out
        if self._mailbox is not None:
            self._mailbox.put_trouble(self.session, error)
        else:
            self._answers.put_nowait(error)

    def _hear(self, message: Message, num_bytes: int) -> None:
        if isinstance(message, Leaving):
            self.is_leaving = True
            self.on_leaving()
        elif self._mailbox is not None:
            self._mailbox.put(self.session, message, num_bytes)
        else:
            self._unread_bytes += num_bytes
            is_too_much = self._unread_bytes > 2 * MAX_FRAME_BYTES
            if is_too_much or self._answers.qsize() >= _MAX_UNREAD:
                raise RemoteProtocolError(f"{self.name} says more than it was asked")
            self._answers.put_nowait((message, num_bytes))

    async def _receive_answer(self, stream: Stream, on_frame: Callable[[int], None]) -> Message:
        if self._listening is None or stream is not self._interactive:
            return await receive(stream, self.name, self.session, on_frame)
        answer = await self._answers.get()
        if isinstance(answer, ShoalError):
            raise answer
        message, num_bytes = answer
        self._unread_bytes -= num_bytes
        on_frame(num_bytes)
        return check_answer(message, self.name, self.session)

    async def send(self, message: Message, timeout_seconds: float, carrying: float = 0.0) -> int:
        """Say something without waiting for an answer; return the bytes of its frame.

        Raises SilentError when the peer does not take it in time, UnavailableError when the
        stream is broken.
        """
        frame = encode_frame(message)
        is_step = isinstance(message, Step)
        lane = choose_lane(message, len(frame)) if is_step else Lane.INTERACTIVE
        try:
            async with asyncio.timeout(timeout_seconds + carrying), self._sending:
                stream = await self._choose_stream(lane)
                await stream.send(frame)
        except TimeoutError as error:
            raise SilentError(f"{self.name} does not read what is sent") from error
        return len(frame)

    async def close(self) -> None:
        """Tell the peer that the session is over and hang up. Never raises."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait((self._listening,))
        goodbye = encode_frame(Close(self._opening.session, self._opening.epoch))
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS), self._sending:
                await self._interactive.send(goodbye)
        except (UnavailableError, LocalProtocolError, TimeoutError):
            pass  # the peer frees the session when the stream ends
        finally:
            await self._interactive.close()
            if self._bulk is not None:
                await self._bulk.close()

    async def _choose_stream(self, lane: Lane) -> Stream:
        if lane is Lane.INTERACTIVE:
            return self._interactive
        if self._bulk is None:
            self._bulk = await _dial(self._transport, self.hop, 5.0)
            welcome, _ = await greet(self._bulk, self.name, self._clock, self._client)
            check_welcome(welcome, self.hop, self._opening.model_id)
        if self._bulk_capability != self.capability:
            attach = Attach(self.session, self._opening.epoch, self.capability)
            await self._bulk.send(encode_frame(attach))
            self._bulk_capability = self.capability
        return self._bulk

    def check_output(self, step: Step, answer: Message) -> Output:
        """Return the answer to a step; raises RemoteProtocolError if it is none."""
        num_tokens = 1 if step.last_token_only else step.hidden.tokens
        expected = (step.hidden.rows, num_tokens, step.hidden.width)
        if (
            not isinstance(answer, Output)
            or (answer.session, answer.sequence) != (step.session, step.sequence)
            or answer.hidden.shape != expected
            or answer.hidden.dtype is not self._opening.dtype
        ):
            raise RemoteProtocolError(f"{self.name} answered a step with something else")
        return answer


async def _dial(transport: Transport, hop: Hop, timeout_seconds: float) -> Stream:
    return await dial(transport, hop.peer.peer_id, hop.peer.all_endpoints, timeout_seconds)


def _do_nothing() -> None:
    """Be told of a peer that leaves while nobody minds."""


def _ignore(num_bytes: int) -> None:
    """Be told of a frame while nobody watches."""


def check_welcome(welcome: Welcome, hop: Hop, model_id: ModelId) -> None:
    """Raise StaleAnnouncementError or RemoteProtocolError unless the peer is what it announced."""
    if welcome.peer_id != hop.peer.peer_id:
        raise StaleAnnouncementError(f"another peer answers for …{hop.peer.peer_id[-6:]}")
    if not versions.MIN_VERSION <= welcome.version <= versions.MAX_VERSION:
        raise RemoteProtocolError(f"peer …{hop.peer.peer_id[-6:]} chose an unsupported version")
    if welcome.model_id == model_id and not welcome.span.covers(hop.span):
        raise StaleAnnouncementError(
            f"peer …{hop.peer.peer_id[-6:]} announced blocks {hop.span} and serves {welcome.span}"
        )
    if welcome.model_id != model_id:
        raise StaleAnnouncementError(f"peer …{hop.peer.peer_id[-6:]} now serves another model")
