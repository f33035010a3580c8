"""One hop of one session on the wire: open it, ask one step at a time, check what comes back."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from ..protocol import versions
from ..protocol.errors import (
    CacheFullError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
    UsageError,
)
from ..protocol.ids import ClientToken, SessionId
from ..protocol.messages import (
    Close,
    Declined,
    Gap,
    Hello,
    Message,
    Open,
    Opened,
    Output,
    Queued,
    Step,
    Welcome,
)
from ..protocol.net.clock import Clock
from ..protocol.net.transport import Lane, Stream, Transport
from ..protocol.wire import decode_frame, encode_frame
from .deadlines import WakefulTimeout
from .router import Hop
from .trace import QuestionWatch

BULK_FRAME_BYTES = 256 * 2**10
"""Larger steps go over the second connection, so that they never delay a token."""

_GOODBYE_SECONDS = 1.0
"""How long saying Close may take: a stream that is stuck is hung up on without."""


class StaleAnnouncementError(UnavailableError):
    """What a peer announced is not, or no longer, what is found there.

    That need not be its fault: it was restarted with other blocks, or its port went to another.
    """


@dataclass(frozen=True)
class LinkFacts:
    """What was learned while opening."""

    rtt_seconds: float
    queue_seconds: float
    free_kv_tokens: int


async def greet(
    stream: Stream, hop_name: str, clock: Clock, client: ClientToken, *more: Message
) -> tuple[Welcome, float]:
    """Say Hello (and `more` right behind it); return the Welcome and the round-trip seconds.

    Raises RefusedError when the versions do not fit, RemoteProtocolError for any other answer.
    """
    asked_at = clock.now()
    hello = Hello(versions.MIN_VERSION, versions.MAX_VERSION, versions.SOFTWARE, client)
    await stream.send(encode_frame(hello))
    for message in more:
        await stream.send(encode_frame(message))
    answer = await _receive(stream, hop_name)
    if not isinstance(answer, Welcome):
        raise RemoteProtocolError(f"{hop_name} answered Hello with {type(answer).__name__}")
    return answer, clock.now() - asked_at


async def _receive(
    stream: Stream,
    hop_name: str,
    session: SessionId | None = None,
    watch: QuestionWatch | None = None,
) -> Message:
    """Return the next message; a Declined becomes the RefusedError it stands for.

    Raises RemoteProtocolError for a refusal of some other session.
    """
    frame = await stream.receive()
    if frame is None:
        raise UnavailableError(f"{hop_name} ended the stream")
    if watch is not None:
        watch.note_arrived(len(frame))
    message = decode_frame(frame)
    if not isinstance(message, Declined):
        return message
    if message.session not in (None, session):
        raise RemoteProtocolError(f"{hop_name} declined what it was not asked")
    if message.code is ErrorCode.CACHE_FULL:
        raise CacheFullError(message.detail, message.retry_after_seconds)
    raise RefusedError(message.code, message.detail, message.retry_after_seconds)


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
        self.hop = hop
        self.session = opening.session
        self.name = f"peer …{hop.peer.peer_id[-6:]} (blocks {hop.span})"

    def __repr__(self) -> str:
        return f"<HopLink {self.name}>"

    @classmethod
    async def open(
        cls, transport: Transport, clock: Clock, hop: Hop, opening: Open, client: ClientToken,
        timeout_seconds: float, on_queued: Callable[[float], None] = lambda seconds: None,
    ) -> tuple["HopLink", LinkFacts]:  # fmt: skip
        """Dial a peer and open a session for the hop's span, under the name of `client`.

        A peer without room may take as long as `opening` allows; `on_queued` gets its estimate in
        seconds. Raises UnavailableError (StaleAnnouncementError where the peer is not what it
        announced), RefusedError or RemoteProtocolError; nothing is left open then.
        """
        opening = replace(opening, span=hop.span)
        async with AsyncExitStack() as undo:
            try:
                async with WakefulTimeout(timeout_seconds) as timeout:
                    stream = await _dial(transport, hop, Lane.INTERACTIVE, timeout_seconds)
                    undo.push_async_callback(stream.close)
                    link = cls(transport, clock, hop, opening, client, stream)
                    welcome, rtt_seconds = await greet(stream, link.name, clock, client, opening)
                    _check_welcome(welcome, hop, opening)
                    opened = await _receive(stream, link.name, opening.session)
                    if isinstance(opened, Queued) and opening.max_wait_seconds > 0:
                        on_queued(opened.wait_seconds)
                        timeout.restart(opening.max_wait_seconds + timeout_seconds)
                        opened = await _receive(stream, link.name, opening.session)
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
                stream = await self._choose_stream(len(frame))
                await stream.send(frame)
                timeout.restart(timeout_seconds + carrying_seconds)
                answer = await _receive(stream, self.name, step.session, watch)
        except TimeoutError as error:
            raise SilentError(
                f"{self.name} did not answer within {timeout_seconds + carrying_seconds:.1f} s"
            ) from error
        if isinstance(answer, Gap):
            raise UnavailableError(f"{self.name} lost the prefix of the session")
        self._check_output(step, answer)
        assert isinstance(answer, Output)
        return answer

    async def close(self) -> None:
        """Tell the peer that the session is over and hang up. Never raises."""
        goodbye = encode_frame(Close(self._opening.session, self._opening.epoch))
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._interactive.send(goodbye)
        except (UnavailableError, LocalProtocolError, TimeoutError):
            pass  # the peer frees the session when the stream ends
        finally:
            await self._interactive.close()
            if self._bulk is not None:
                await self._bulk.close()

    async def _choose_stream(self, frame_bytes: int) -> Stream:
        if frame_bytes <= BULK_FRAME_BYTES:
            return self._interactive
        if self._bulk is None:
            self._bulk = await _dial(self._transport, self.hop, Lane.BULK, 5.0)
            welcome, _ = await greet(self._bulk, self.name, self._clock, self._client)
            _check_welcome(welcome, self.hop, self._opening)
        return self._bulk

    def _check_output(self, step: Step, answer: Message) -> None:
        num_tokens = 1 if step.last_token_only else step.hidden.tokens
        expected = (step.hidden.rows, num_tokens, step.hidden.width)
        if (
            not isinstance(answer, Output)
            or (answer.session, answer.sequence) != (step.session, step.sequence)
            or answer.hidden.shape != expected
            or answer.hidden.dtype is not self._opening.dtype
        ):
            raise RemoteProtocolError(f"{self.name} answered a step with something else")


async def _dial(transport: Transport, hop: Hop, lane: Lane, timeout_seconds: float) -> Stream:
    """Try the endpoints of a peer in their order; that they are good ones is for it to see to."""
    error: UnavailableError | RemoteProtocolError
    error = RemoteProtocolError(f"peer …{hop.peer.peer_id[-6:]} announced no endpoint")
    for endpoint in hop.peer.doors:
        try:
            return await transport.open_stream(endpoint, lane, timeout_seconds)
        except UnavailableError as failure:
            error = failure
        except RemoteProtocolError as failure:  # another certificate, or another program
            error = StaleAnnouncementError(str(failure))
            error.__cause__ = failure
        except UsageError as failure:
            error = RemoteProtocolError(f"an endpoint that cannot be used: {failure}")
            error.__cause__ = failure
    raise error


def _check_welcome(welcome: Welcome, hop: Hop, opening: Open) -> None:
    if welcome.peer_id != hop.peer.peer_id:
        raise StaleAnnouncementError(f"another peer answers for …{hop.peer.peer_id[-6:]}")
    if not versions.MIN_VERSION <= welcome.version <= versions.MAX_VERSION:
        raise RemoteProtocolError(f"peer …{hop.peer.peer_id[-6:]} chose a version of its own")
    if welcome.model_id == opening.model_id and not welcome.span.covers(hop.span):
        raise StaleAnnouncementError(
            f"peer …{hop.peer.peer_id[-6:]} announced blocks {hop.span} and serves {welcome.span}"
        )
    if welcome.model_id != opening.model_id:
        raise StaleAnnouncementError(f"peer …{hop.peer.peer_id[-6:]} serves another model by now")
