"""One hop of a session: its streams, what its peer has said, and the log of what it was sent."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...kernels.wire_tensors import decode_as, encode_as
from ...protocol.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ...protocol.ids import NO_CAPABILITY, Capability, ClientToken, SessionId
from ...protocol.messages.codec import check_kind, decode_frame, encode_frame, read_answer
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import PassPiece
from ...protocol.messages.session import (
    Attach,
    Close,
    Declined,
    Gap,
    Lane,
    Leaving,
    NextHop,
    Open,
    Opened,
    Output,
    Queued,
    Status,
    Step,
    choose_lane,
)
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import open_greeted
from ...protocol.net.transport import Stream, Transport
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype, WireTensor
from ..routing.route import Ends, Hop, LostHopError

_GOODBYE_SECONDS = 1.0
"""How long saying Close may take: a stream that is stuck is hung up on without."""

_MAX_STATUSES = 8
"""Answers of one hop that are kept: nobody waits any more for those before."""

_MAX_UNASKED = 64
"""Outputs that a hop may send beyond those that it was asked for: it repeats one where a step
reaches it again after a failover, and a standby answers what comes before it is told to push."""


class GapError(UnavailableError):
    """A hop has not got what stands before a step."""


class UnaskedOutputsError(RemoteProtocolError):
    """A hop goes on answering what it was not asked, or what the hop before makes up."""


@dataclass(frozen=True)
class Arrived:
    """An output, and the size of the frame that brought it."""

    output: Output
    num_bytes: int


class Mailbox:
    """Filled by the links of a session, read by tasks that wait for one of its hops.

    `newest_step` returns the number of the session's newest step, which no output exceeds.
    """

    def __init__(self, newest_step: Callable[[], int]) -> None:
        self._newest_step = newest_step
        self._expected: set[tuple[SessionId, int]] = set()
        self._replays: dict[SessionId, Arrived | None] = {}
        self._outputs: dict[tuple[SessionId, int], Arrived] = {}
        self._num_unasked: Counter[SessionId] = Counter()  # negative: so many may still come
        self._statuses: dict[tuple[SessionId, int], Status] = {}
        self._num_asked: Counter[SessionId] = Counter()
        self._num_told: Counter[SessionId] = Counter()
        self._troubles: dict[SessionId, ShoalError] = {}
        self._news: asyncio.Event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Mailbox: {len(self._outputs)} outputs, {len(self._troubles)} troubles>"

    def expect(self, session: SessionId, sequence: int) -> None:
        """Keep the output of a step when it comes; others are dropped."""
        self._expected.add((session, sequence))
        self._num_unasked[session] -= 1

    def newest_expected(self, session: SessionId) -> int:
        """Return the number of the newest step whose output is expected; 0 where there is none."""
        return max((number for known, number in self._expected if known == session), default=0)

    def expect_replay(self, session: SessionId) -> None:
        """Keep the newest output of a new hop until its replay is over: its length is not known."""
        self._replays[session] = None

    def end_replay(self, session: SessionId) -> None:
        """Drop what came of a replay: its end was all that counts."""
        self._replays.pop(session, None)

    def take_output(self, session: SessionId, sequence: int) -> Arrived | None:
        """Return the output of a step if it is here."""
        arrived = self._outputs.pop((session, sequence), None)
        if arrived is not None:
            self._expected.discard((session, sequence))
            return arrived
        newest = self._replays.get(session)
        return newest if newest is not None and newest.output.sequence >= sequence else None

    def expect_status(self, session: SessionId) -> int:
        """Note that a hop is asked how it is; return the number of that question."""
        self._num_asked[session] += 1
        return self._num_asked[session]

    def find_status(self, session: SessionId, number: int) -> Status | None:
        """Return what a hop answered to a question, once it has."""
        return self._statuses.pop((session, number), None)

    def trouble(self, session: SessionId) -> ShoalError | None:
        """Return what is wrong at a hop, the first that was heard of it."""
        return self._troubles.get(session)

    def forgive(self, *sessions: SessionId) -> None:
        """Forget what was wrong: it has been seen to."""
        for session in sessions:
            self._troubles.pop(session, None)
            self._num_unasked[session] = min(0, self._num_unasked[session])

    def forget(self, session: SessionId) -> None:
        """Drop everything of a hop that is no longer part of the session."""
        self.forgive(session)
        self._replays.pop(session, None)
        for known in (self._num_asked, self._num_told, self._num_unasked):
            known.pop(session, None)
        self._statuses = {key: value for key, value in self._statuses.items() if key[0] != session}
        self._expected = {key for key in self._expected if key[0] != session}
        self._outputs = {key: value for key, value in self._outputs.items() if key[0] != session}

    def forget_steps(self) -> None:
        """Expect nothing more: the step under way is over."""
        self._expected.clear()
        self._outputs.clear()

    def put(self, session: SessionId, name: str, message: Message, num_bytes: int) -> None:
        """Take in what a hop of this name has said.

        Raises RemoteProtocolError for what no hop may say, after which it is not listened to.
        """
        if isinstance(message, Declined):
            self.put_trouble(session, message.make_error(name, session))
        elif isinstance(message, Gap) and message.session == session:
            self.put_trouble(session, GapError(f"{name} lost the prefix of the session"))
        elif isinstance(message, Status) and message.session == session:
            self._num_told[session] += 1
            number = self._num_told[session]
            if number > self._num_asked[session] + _MAX_STATUSES:
                raise RemoteProtocolError(f"{name} goes on saying how it is without being asked")
            self._statuses[session, number] = message
            self._statuses.pop((session, number - _MAX_STATUSES), None)
        elif isinstance(message, Output) and message.session == session:
            self._put_output(session, name, Arrived(message, num_bytes))
        else:
            raise RemoteProtocolError(f"{name} said {message!r:.80} without being asked")
        self._news.set()

    def _put_output(self, session: SessionId, name: str, arrived: Arrived) -> None:
        sequence = arrived.output.sequence
        if (session, sequence) in self._expected:
            self._outputs[session, sequence] = arrived
        elif session in self._replays:
            newest = self._replays[session]
            before = 0 if newest is None else newest.output.sequence
            if before < sequence <= self._newest_step():
                self._replays[session] = arrived
                return
        self._num_unasked[session] += 1
        if self._num_unasked[session] > _MAX_UNASKED:
            # It is listened to: it may only answer what the hop before makes up.
            error = UnaskedOutputsError(f"{name} goes on answering steps that nobody has sent it")
            self.put_trouble(session, error)

    def put_trouble(self, session: SessionId, error: ShoalError) -> None:
        """Note what is wrong at a hop; the first counts, the rest follows from it."""
        self._troubles.setdefault(session, error)
        self._news.set()

    async def wait(self) -> None:
        """Wait until there is something new since the last wait of any task."""
        news = self._news
        await news.wait()
        if news is self._news:
            self._news = asyncio.Event()


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
        self._mailbox: Mailbox  # since `listen`
        self._sending = asyncio.Lock()
        self.is_torn = False  # a send was cancelled in the middle of its frame
        self.is_leaving = False  # its peer will stop soon, and serves until then
        self.on_leaving: Callable[[], None] = lambda: None
        self.capability = opening.capability
        self.hop = hop
        self.session = opening.session
        self.name = hop.name

    def __repr__(self) -> str:
        return f"<HopLink {self.name}>"

    @classmethod
    async def open(
        cls, transport: Transport, clock: Clock, hop: Hop, opening: Open, client: ClientToken,
        timeout_seconds: float, on_queued: Callable[[float], None] = lambda seconds: None,
        prompts: Sequence[PassPiece] = (),
    ) -> tuple[HopLink, float]:  # fmt: skip
        """Dial a peer and open a session for the hop's span, under the name of `client`.

        Its deep `prompts` follow. A peer without room may take as long as `opening` allows;
        `on_queued` gets its estimate in seconds. Returns the link and the round-trip seconds.

        Raises UnavailableError (StaleAnnouncementError where the peer is not what it announced),
        RefusedError or RemoteProtocolError; nothing is left open then.
        """
        opening = replace(opening, span=hop.span)
        async with AsyncExitStack() as undo:
            complaint = f"{hop.name} did not open a session in time"
            async with AnswerTimeout(timeout_seconds, complaint) as timeout:
                stream, rtt_seconds = await open_greeted(
                    transport, clock, hop.peer, hop.span, timeout_seconds,
                    client, opening,
                )  # fmt: skip
                undo.push_async_callback(stream.close)
                link = cls(transport, clock, hop, opening, client, stream)
                for piece in prompts:
                    await stream.send(encode_frame(piece))
                opened = read_answer(await stream.receive(), link.name, opening.session)
                if isinstance(opened, Queued) and opening.max_wait_seconds > 0:
                    on_queued(opened.wait_seconds)
                    timeout.restart(opening.max_wait_seconds + timeout_seconds)
                    opened = read_answer(await stream.receive(), link.name, opening.session)
            if check_kind(opened, Opened, link.name).session != opening.session:
                raise RemoteProtocolError(f"{link.name} opened another session")
            undo.pop_all()
            return link, rtt_seconds

    def listen(self, mailbox: Mailbox) -> None:
        """Put everything that the peer says from now on, until `close`, into a mailbox.

        May be called again, with another one.
        """
        self._mailbox = mailbox
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name=f"hearing {self.name}")

    async def _listen(self) -> None:
        error: ShoalError = UnavailableError(f"{self.name} ended the stream")
        try:
            while (frame := await self._interactive.receive()) is not None:
                message = decode_frame(frame)
                if isinstance(message, Leaving):
                    self.is_leaving = True
                    self.on_leaving()
                else:
                    self._mailbox.put(self.session, self.name, message, len(frame))
        except ShoalError as failure:
            error = failure
        self.is_leaving = False  # it has left, and the next step will find that out
        self._mailbox.put_trouble(self.session, error)

    async def send(
        self,
        message: Message,
        timeout_seconds: float,
        note_encoded: Callable[[int], None] | None = None,
    ) -> None:
        """Say something without waiting for an answer.

        `note_encoded` hears of how many bytes the frame is, before it goes out. Raises SilentError
        when the peer does not take it in time, UnavailableError when the stream is broken, and what
        dialling another one raises.
        """
        frame = encode_frame(message)
        if note_encoded is not None:
            note_encoded(len(frame))
        # A hop without a capability answers a step on the stream that it came on.
        lane = Lane.INTERACTIVE
        if isinstance(message, Step) and self.capability:
            lane = choose_lane(message, len(frame))
        async with (
            AnswerTimeout(timeout_seconds, f"{self.name} does not read what is sent"),
            self._sending,
        ):
            stream = await self._choose_stream(lane)
            await self._send_frame(stream, frame)

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
            peer, span = self.hop.peer, self.hop.span
            self._bulk, _ = await open_greeted(
                self._transport, self._clock, peer, span, 5.0, self._client
            )
        if self._bulk_capability != self.capability:
            attach = Attach(self.session, self._opening.epoch, self.capability)
            await self._send_frame(self._bulk, encode_frame(attach))
            self._bulk_capability = self.capability
        return self._bulk

    async def _send_frame(self, stream: Stream, frame: bytes) -> None:
        try:
            await stream.send(frame)
        except asyncio.CancelledError:
            self.is_torn = True
            raise

    def check_output(self, step: Step, output: Output) -> Output:
        """Return the answer to a step; raises RemoteProtocolError if it is none."""
        num_tokens = 1 if step.last_token_only else step.hidden.tokens
        expected = (step.hidden.rows, num_tokens, step.hidden.width)
        if (
            (output.session, output.sequence) != (self.session, step.sequence)
            or output.hidden.shape != expected
            or output.hidden.dtype is not self._opening.dtype
        ):
            raise RemoteProtocolError(f"{self.name} answered a step with something else")
        return output


@dataclass(frozen=True)
class Question:
    """One question to a segment; see `messages.Step` for the fields."""

    hidden_BTH: Tensor
    position: int
    row_map: tuple[int, ...] | None = None
    is_decoded: bool = False
    last_token_only: bool = False
    is_piece: bool = False
    sequence: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows times tokens."""
        return self.hidden_BTH.shape[0] * self.hidden_BTH.shape[1]

    @property
    def num_answered_tokens(self) -> int:
        """Rows times tokens of the answer."""
        return self.hidden_BTH.shape[0] if self.last_token_only else self.num_tokens


@dataclass(eq=False)
class LiveHop:
    """A hop in use: a log of everything that was sent to it, and its link, None unless it is open.

    Hops of which each `feeds` the next are a segment of the route; in a star every hop is one of
    its own. The log of the first of them is complete, unless `is_log_whole` says otherwise; the
    others were sent nothing from here. Without a `capability` nobody may push to the hop.
    While others are being brought to its state, `tails` hold what was sent to it since.
    `answered_at`, of the last of a segment, is in seconds of the client's clock.
    """

    hop: Hop
    log: RecoveryLog[Tensor]
    link: HopLink | None = None
    feeds: bool = False
    is_log_whole: bool = True
    capability: Capability = NO_CAPABILITY
    next: NextHop | None = None
    tails: list[list[Question]] = field(default_factory=list)
    answered_at: float = -math.inf

    @property
    def open_link(self) -> HopLink:
        """The link of a hop that was not lost."""
        assert self.link is not None
        return self.link

    @property
    def is_leaving(self) -> bool:
        """Whether its peer has said that it will stop soon."""
        return self.link is not None and self.link.is_leaving


@dataclass(frozen=True)
class MissingHops:
    """Blocks of a session that need hops, and what is there around them.

    The hop `before` has pushed what the lost ones got, or, without one, the client's `log` tells.
    Steps with the sequences `pending` are under way; those of them that are missing are pushed to
    the hop `after`, which has all that is older, and nothing newer than `newest_sequence`.
    """

    span: Span
    log: RecoveryLog[Tensor]
    pending: tuple[int, ...]
    position: int = 0
    before: LiveHop | None = None
    after: LiveHop | None = None
    newest_sequence: int = 0

    @property
    def ends(self) -> Ends:
        """The peers on both sides."""
        before, after = (live and live.hop.peer for live in (self.before, self.after))
        return Ends(before, after)

    @property
    def neighbours(self) -> list[LiveHop]:
        """The hops on both sides."""
        return [live for live in (self.before, self.after) if live is not None]

    @property
    def leaving_neighbours(self) -> list[LiveHop]:
        """Those of them whose peers will stop soon."""
        return [live for live in self.neighbours if live.is_leaving]


class BrokenSegmentError(Exception):
    """Hops of a segment were lost, or the link behind the one at index `link`."""

    def __init__(self, lost: Sequence[LostHopError], link: int | None = None) -> None:
        super().__init__(str(lost[0]) if lost else "a link between two peers does not work")
        self.lost = lost
        self.link = link


class StartOverError(Exception):
    """Nobody has kept what lost hops had got: everything is sent through all hops again."""


def cut_segments(hops: Sequence[LiveHop]) -> list[list[LiveHop]]:
    """Return the hops of a route in runs, of which each pushes to the next."""
    segments: list[list[LiveHop]] = [[]]
    for live in hops:
        segments[-1].append(live)
        if not live.feeds:
            segments.append([])
    return [segment for segment in segments if segment]


def to_wire(hidden_BTH: Tensor, dtype: WireDtype) -> WireTensor:
    """Return hidden states as they travel, converted to the wire's dtype."""
    rows, tokens, width = hidden_BTH.shape
    data = encode_as(dtype.name, hidden_BTH)
    return WireTensor(dtype, rows, tokens, width, data)


def from_wire(tensor: WireTensor) -> Tensor:
    """Return the hidden states of a wire tensor, in its dtype; in float32 where that is int8."""
    return decode_as(tensor.dtype.name, tensor.data, tensor.shape)
