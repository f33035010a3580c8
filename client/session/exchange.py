"""One step over one segment of a route: asked at its first hop, answered by its last.

A segment is one hop, or hops of which each pushes to the next. Every hop of a longer one says on a
stream of its own what is wrong; when an answer is late, all of them are asked how far they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from torch import Tensor

from ...kernels.wire_tensors import has_only_finite, join_pieces
from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import PeerId, SessionId
from ...protocol.messages.session import Admit, Mirror, Output, Probe, Redirect, Status, Step
from ...protocol.net.clock import AnswerTimeout, SuspendAwareTimeout
from ...protocol.session.recovery_log import ReplayPiece, group_pieces
from ..routing.peer_book import FLOOR_SECONDS
from ..routing.route import LostHopError
from ..trace.trace import QuestionWatch, StepKind, choose_kind
from .hop_link import (
    Arrived,
    BrokenSegmentError,
    GapError,
    LiveHop,
    Mailbox,
    Question,
    StartOverError,
    UnaskedOutputsError,
    from_wire,
    to_wire,
)
from .state import SessionContext

_BROKEN = (UnavailableError, RemoteProtocolError, RefusedError)
"""Errors that cost a hop its place."""

_QUESTIONABLE_CODES = frozenset({ErrorCode.BAD_VALUES, ErrorCode.BAD_FRAME})
"""Refusals of a step that another peer pushed: one of the two peers is wrong."""

_LATE_SECONDS = 0.1
"""By how much an answer may be later than a slow one before the hops are asked how far they are. It
costs a small frame each, and blames nobody: a hop then has `FLOOR_SECONDS` to answer."""


class _SegmentFault(Exception):
    """Why a segment does not answer: the hops that are lost, by index, or (`link`) the link behind
    one of them, between two that live.
    """

    def __init__(self, lost: dict[int, ShoalError], link: int | None = None) -> None:
        super().__init__(next((str(error) for error in lost.values()), f"link {link} is broken"))
        self.lost = lost
        self.link = link


@dataclass
class _Asked:
    """A question that is under way through a segment."""

    step: Step
    asked_at: float
    watch: QuestionWatch | None
    num_bytes: int
    """Bytes of hidden states that it brings to the segment."""
    line_bytes: int
    """The same, and those of the answer."""
    carrying_seconds: float
    """Transfer time on the client's own line, both ways."""
    pushing_seconds: float
    """Seconds that the links between the hops need, one after the other."""
    carrying: ExitStack
    is_disturbed: bool = False
    """Hops were lost meanwhile: the time until the answer says nothing of those that answer."""


class Exchange:
    """Asks the hops of one session, and blames the peers of those that do not answer."""

    def __init__(self, state: SessionContext, mailbox: Mailbox) -> None:
        self._state = state
        self._book = state.book
        self._clock = state.clock
        self._mailbox = mailbox
        self._asked: dict[tuple[LiveHop, int], _Asked] = {}  # by segment: replays count anew

    async def ask(
        self, segment: Sequence[LiveHop], question: Question, is_replay: bool = False
    ) -> Tensor:
        """Return a segment's checked answer to a question. Raises BrokenSegmentError."""
        try:
            await self.send(segment, question, is_replay)
            return await self.receive(segment, question)
        finally:
            self.forget(segment, question)

    def check_links(self, segment: Sequence[LiveHop]) -> None:
        """Raise BrokenSegmentError for the hops that were lost before."""
        lost = [live for live in segment if live.link is None]
        if lost:
            raise BrokenSegmentError(
                [LostHopError(live.hop, "the hop was lost before") for live in lost]
            )

    async def send(
        self, segment: Sequence[LiveHop], question: Question, is_replay: bool = False
    ) -> None:
        """Send a question into a segment; its answer is received later.

        Raises BrokenSegmentError.
        """
        self.check_links(segment)
        first, last = segment[0], segment[-1].open_link
        self.forget(segment, question)
        num_bytes, carrying = self._state.count_bytes(question.num_tokens), ExitStack()
        line_bytes = num_bytes + self._state.count_bytes(question.num_answered_tokens)
        carrying_seconds = carrying.enter_context(self._book.bandwidth.carry(line_bytes))
        pushing_seconds = 0.0
        if len(segment) > 1:
            pushing = self._book.links.carry(_list_peers(segment), num_bytes)
            pushing_seconds = carrying.enter_context(pushing)
        asked_at = self._clock.now()
        # From here until the frame is made, a trace counts the time as serialization.
        watch = self._watch(first, question, is_replay)
        step = self._make_step(first, question)
        asked = _Asked(
            step,
            asked_at,
            watch,
            num_bytes,
            line_bytes,
            carrying_seconds,
            pushing_seconds,
            carrying,
        )
        self._asked[first, question.sequence] = asked
        timeout_seconds = self.choose_timeout_seconds(segment[:1], question.num_tokens)
        timeout_seconds += asked.carrying_seconds
        self._mailbox.expect(last.session, step.sequence)
        try:
            note_encoded = None if watch is None else watch.note_encoded
            await first.open_link.send(step, timeout_seconds, note_encoded)
        except _BROKEN as error:
            raise await self._break(segment, _SegmentFault({0: error}), asked) from error
        except asyncio.CancelledError:
            # Half of the step may have been sent, which is not the peer's fault.
            if first.link is not None and first.link.is_torn:
                await self.hang_up(first)
            raise

    async def receive(self, segment: Sequence[LiveHop], question: Question) -> Tensor:
        """Return the checked answer to a question that was sent. Raises BrokenSegmentError."""
        self.check_links(segment)
        asked, last = self._asked[segment[0], question.sequence], segment[-1].open_link
        timeout_seconds = self.choose_timeout_seconds(segment, question.num_tokens)
        timeout_seconds += asked.carrying_seconds
        try:
            try:
                arrived = await self._hear(
                    segment, question.sequence, timeout_seconds, asked.pushing_seconds
                )
                if asked.watch is not None:
                    asked.watch.note_arrived(arrived.num_bytes)
                last.check_output(asked.step, arrived.output)
                output_BTH = _read(arrived.output, last.name)
            except _BROKEN as error:
                raise _SegmentFault({len(segment) - 1: error}) from error
        except _SegmentFault as fault:
            raise await self._break(segment, fault, asked) from fault
        read_at = self._clock.now()
        self.forget(segment, question)
        self._note_answer(segment, asked, arrived.output, read_at)
        return output_BTH

    def forget(self, segment: Sequence[LiveHop], question: Question) -> None:
        """Note that nobody waits for the answer to a question any more."""
        asked = self._asked.pop((segment[0], question.sequence), None)
        if asked is not None:
            asked.carrying.close()

    def end_step(self) -> None:
        """Forget every question: the step they belong to is over."""
        for asked in self._asked.values():
            asked.carrying.close()
        self._asked.clear()
        self._mailbox.forget_steps()

    async def wait_for_replay(
        self, segment: Sequence[LiveHop], num_steps: int, num_tokens: int
    ) -> None:
        """Wait until the hops of a segment have done a replay that the first of them pushes."""
        timeout_seconds = self.choose_timeout_seconds(segment, num_tokens)
        try:
            with self.pushing(segment, num_tokens) as pushing_seconds:
                await self._hear(segment, num_steps, timeout_seconds, pushing_seconds)
        except _SegmentFault as fault:
            raise await self._break(segment, fault) from fault

    def pushing(self, segment: Sequence[LiveHop], num_tokens: int) -> AbstractContextManager[float]:
        """Count tokens as pushed from each hop to the next; gives the seconds that may take.

        This does not measure the links: much may have arrived before anybody waits.
        """
        num_bytes = self._state.count_bytes(num_tokens)
        return self._book.links.carry(_list_peers(segment), num_bytes)

    async def hang_up(self, *lives: LiveHop) -> None:
        """Drop the links of hops, all of them before the first wait; their logs stay.

        The links are closed even when the caller is cancelled meanwhile.
        """
        links = [live.link for live in lives if live.link is not None]
        for live in lives:
            live.link = None
        for link in links:
            self._mailbox.forget(link.session)
        await self._state.background.close(*links)

    async def lose(
        self, live: LiveHop, error: UnavailableError | RemoteProtocolError | RefusedError
    ) -> LostHopError:
        """Hang up on a hop and blame its peer, unless we broke the stream; return what to raise."""
        is_ours = live.link is not None and live.link.is_torn and not isinstance(error, SilentError)
        await self.hang_up(live)
        if is_ours:
            lost = LostHopError(live.hop, str(error))
        else:
            lost = self._book.blame(live.hop, error, self._state.forgiven)
        lost.__cause__ = error
        return lost

    async def tell(self, live: LiveHop, message: Admit | Redirect) -> Status:
        """Say something to a hop that it answers at once; raises BrokenSegmentError if it is lost.

        Earlier troubles of the hop with its links are over then. Raises StartOverError where the
        hop has not kept what it pushed.
        """
        link = live.open_link
        try:
            status = await self.ask_status(live, message)
        except RefusedError as error:
            if error.code is ErrorCode.LOG_INCOMPLETE:
                raise StartOverError from error
            raise BrokenSegmentError([await self.lose(live, error)]) from error
        except (UnavailableError, RemoteProtocolError) as error:
            raise BrokenSegmentError([await self.lose(live, error)]) from error
        self._mailbox.forgive(link.session)
        return status

    async def ask_status(self, live: LiveHop, message: Probe | Admit | Redirect | Mirror) -> Status:
        """Say something to a hop that it answers at once.

        Raises SilentError when it does not answer, or what else is wrong with it, and blames
        nobody.
        """
        link, mailbox = live.open_link, self._mailbox
        # However busy it is, a peer that lives says so at once.
        timeout_seconds = FLOOR_SECONDS + 2 * self._state.rtt_seconds(live.hop)
        async with AnswerTimeout(timeout_seconds, _describe_silence(live, timeout_seconds)):
            await link.send(message, timeout_seconds)
            # Not before: what was never sent is never answered.
            number = mailbox.expect_status(link.session)
            while (status := mailbox.find_status(link.session, number)) is None:
                error = mailbox.trouble(link.session)
                if error is not None and not _is_about_links(error):
                    raise error
                await mailbox.wait()
        return status

    async def _hear(
        self,
        segment: Sequence[LiveHop],
        sequence: int,
        timeout_seconds: float,
        pushing_seconds: float,
    ) -> Arrived:
        """Return the output of a step that the last hop answers with.

        When it is late, every hop is asked how far it is: one that lives says so at once, even
        while others need `pushing_seconds` more to push the step along. A hop without a capability
        says nothing before it is done. Raises _SegmentFault.
        """
        session = segment[-1].open_link.session
        if not segment[0].capability:
            complaint = _describe_silence(segment[0], timeout_seconds)
            async with AnswerTimeout(timeout_seconds, complaint):
                return await self._take_output(segment, session, sequence)
        late_seconds = max(0.0, timeout_seconds - FLOOR_SECONDS) + _LATE_SECONDS
        with contextlib.suppress(TimeoutError):
            async with SuspendAwareTimeout(late_seconds):
                return await self._take_output(segment, session, sequence)
        timeout_seconds += pushing_seconds
        rest_seconds = timeout_seconds - late_seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(
                    self._watch_chain(segment, sequence, rest_seconds, timeout_seconds),
                    name="watching a chain",
                )
                arrived = await self._take_output(segment, session, sequence)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return arrived

    async def _take_output(
        self, segment: Sequence[LiveHop], session: SessionId, sequence: int
    ) -> Arrived:
        """Wait for an output. Raises _SegmentFault for what a hop says is wrong."""
        while (arrived := self._mailbox.take_output(session, sequence)) is None:
            await self._check_troubles(segment)
            await self._mailbox.wait()
        return arrived

    async def _watch_chain(
        self,
        segment: Sequence[LiveHop],
        sequence: int,
        rest_seconds: float,
        timeout_seconds: float,
    ) -> None:
        """Find out why an answer is late; raises _SegmentFault for whose fault that is.

        A silent hop is lost after the same time as in a star: one that lives answers a probe at
        once, so it is sent before the deadline, when the answer is only a little late. A step that
        stands still at a hop that lives is the hop's fault once the deadline has passed.
        """
        everybody = range(len(segment))
        await self._probe(segment, everybody)
        await _wait_awake(rest_seconds)
        before: list[tuple[int, int]] | None = None
        while True:
            statuses = await self._probe(segment, everybody)
            progress = [(status.sequence, status.done_sequence) for status in statuses]
            if before is None or progress == before:
                is_first = before is None
                self._check_progress(segment, sequence, statuses, timeout_seconds, is_first)
            before = progress
            await _wait_awake(timeout_seconds)

    async def _probe(self, segment: Sequence[LiveHop], indices: Sequence[int]) -> list[Status]:
        """Return how far some hops are; raises _SegmentFault with those that say nothing."""
        statuses = await asyncio.gather(
            *(
                self.ask_status(live, Probe(live.open_link.session, 0))
                for live in (segment[index] for index in indices)
            ),
            return_exceptions=True,
        )
        lost: dict[int, ShoalError] = {}
        found: list[Status] = []
        for index, status in zip(indices, statuses, strict=True):
            if isinstance(status, ShoalError):
                lost[index] = status
            elif isinstance(status, BaseException):
                raise status
            else:
                found.append(status)
        if lost:
            raise _SegmentFault(lost)
        return found

    async def _check_troubles(self, segment: Sequence[LiveHop]) -> None:
        """Raise _SegmentFault for what any of the hops has said."""
        lost: dict[int, ShoalError] = {}
        broken_links: list[int] = []
        last = len(segment) - 1
        for index, live in enumerate(segment):
            link = live.open_link
            error = self._mailbox.trouble(link.session)
            if error is None:
                continue
            if _is_about_link_behind(error):
                if index < last:  # or else it pushes to a hop that is not asked here
                    broken_links.append(index)
            elif index > 0 and _is_about_link_before(error):
                broken_links.append(index - 1)
            else:
                lost[index] = error
        if lost:
            raise _SegmentFault(lost)
        if broken_links:
            await self._probe(segment, (broken_links[0], broken_links[0] + 1))
            raise _SegmentFault({}, link=broken_links[0])

    def _check_progress(
        self,
        segment: Sequence[LiveHop],
        sequence: int,
        statuses: Sequence[Status],
        timeout_seconds: float,
        is_first: bool,
    ) -> None:
        """Raise _SegmentFault for the hop, or the link, at which a step stands still."""

        def silence(index: int) -> _SegmentFault:
            detail = _describe_silence(segment[index], timeout_seconds)
            return _SegmentFault({index: SilentError(detail)})

        last = len(segment) - 1
        newest = max(sequence, self._mailbox.newest_expected(segment[last].open_link.session))
        for index, status in enumerate(statuses):
            if index > 0 and status.sequence > newest:
                raise _SegmentFault({}, link=index - 1)  # it was pushed what nobody has sent
            if status.done_sequence >= sequence:
                continue
            if index > 0 and status.sequence < sequence:
                raise _SegmentFault({}, link=index - 1)
            raise silence(index)
        if not is_first:  # its answer may have been on its way
            raise silence(last)

    async def _break(
        self, segment: Sequence[LiveHop], fault: _SegmentFault, asked: _Asked | None = None
    ) -> BrokenSegmentError:
        """Hang up on what is lost of a segment; return what to raise."""
        if asked is not None and asked.watch is not None:
            asked.watch.note_lost(fault)
        if asked is not None and not segment[0].capability:
            # Nothing else is on its way on this stream, so the silence may be that of our line.
            asked.carrying.close()
            if any(isinstance(error, SilentError) for error in fault.lost.values()):
                self._book.bandwidth.note_silence(asked.line_bytes)
        for other in self._asked.values():
            other.is_disturbed = True
        lost: list[LostHopError] = []
        for index, error in fault.lost.items():
            assert isinstance(error, _BROKEN)
            lost.append(await self.lose(segment[index], error))
        return BrokenSegmentError(lost, fault.link)

    def _note_answer(
        self, segment: Sequence[LiveHop], asked: _Asked, output: Output, now: float
    ) -> None:
        """Share the time that a step took until `now` out among the hops, as far as they tell.

        A piece of a prompt is sent behind others: what those took is not its own, and a short last
        one would make its hops look slow for steps of few tokens.
        """
        last = segment[-1]
        began_at, last.answered_at = max(asked.asked_at, last.answered_at), now
        num_tokens = asked.step.hidden.rows * asked.step.hidden.tokens
        is_alone, hops = not last.capability, [live.hop for live in segment]
        expected_seconds = [] if is_alone else self._expect_way_seconds(segment)
        if asked.watch is not None:
            asked.watch.note_answered(hops, output, expected_seconds, now)
        if asked.is_disturbed:
            return
        carried_seconds = now - asked.asked_at
        self._book.bandwidth.note_answer(asked.line_bytes, carried_seconds)
        if is_alone:
            self._book.note_answer(last.hop, num_tokens, carried_seconds)
            return
        self._book.links.note_answer(_list_peers(segment), asked.num_bytes, carried_seconds)
        seconds = now - began_at
        told = [sum(times) for times in output.before]
        told.append(output.queue_seconds + output.compute_seconds)
        if len(told) == len(segment):  # not so where a hop was replaced meanwhile
            way_seconds = max(0.0, seconds - sum(told)) / len(segment)
            for hop, own_seconds in zip(hops, told, strict=True):
                hop_seconds = min(own_seconds, seconds) + way_seconds
                self._book.note_answer(
                    hop, num_tokens, hop_seconds, sum(expected_seconds) / len(segment)
                )

    def _expect_way_seconds(self, segment: Sequence[LiveHop]) -> list[float]:
        """Return the ways of a chain: to the first hop, from each to the next, and back."""
        known = self._book.way_seconds.get(tuple(_list_peers(segment)))
        return known or self._state.swarm.expect_way_seconds([live.hop for live in segment])

    def _watch(self, first: LiveHop, question: Question, is_replay: bool) -> QuestionWatch | None:
        recorder = self._state.recorder
        if recorder is None:
            return None
        kind = StepKind.REPLAY if is_replay else choose_kind(question.is_decoded)
        return recorder.watch(first.hop, kind, question.position, question.hidden_BTH.shape[1])

    def choose_timeout_seconds(self, segment: Sequence[LiveHop], num_tokens: int) -> float:
        """Return how long the hops may take, one after the other."""
        seconds = FLOOR_SECONDS
        for live in segment:
            peer = live.hop.peer
            seconds -= FLOOR_SECONDS  # what a busy machine gets in any case, but once
            seconds += self._book.times(peer.peer_id).choose_timeout_seconds(
                num_tokens, peer, self._book.times_of_others(peer.peer_id)
            )
        return seconds

    def _make_step(self, first: LiveHop, question: Question) -> Step:
        assert self._state.wire_dtype is not None
        return Step(
            first.open_link.session,
            self._state.epoch,
            question.sequence,
            question.position,
            to_wire(question.hidden_BTH, self._state.wire_dtype),
            question.row_map,
            question.is_decoded,
            question.last_token_only,
            question.is_piece and bool(first.open_link.capability),
        )


def merge_pieces(
    pieces: Iterable[ReplayPiece[Tensor]], max_tokens: int, last_token_only: bool = True
) -> Iterator[Question]:
    """Return a replay as few large questions, with the rows in their newest order.

    Generated tokens go together: see `group_pieces`.
    """
    for sequence, group in enumerate(group_pieces(pieces, max_tokens), 1):
        yield Question(
            join_pieces(group),
            group[0].position,
            is_decoded=group[0].is_decoded,
            last_token_only=last_token_only,
            is_piece=True,
            sequence=sequence,
        )


def _describe_silence(live: LiveHop, seconds: float) -> str:
    return f"{live.open_link.name} did not answer within {seconds:.1f} s"


async def _wait_awake(seconds: float) -> None:
    """Let time pass in which this process runs."""
    with contextlib.suppress(TimeoutError):
        async with SuspendAwareTimeout(seconds):
            await asyncio.get_running_loop().create_future()


def _is_about_link_behind(error: ShoalError) -> bool:
    return isinstance(error, RefusedError) and error.code is ErrorCode.NEXT_UNREACHABLE


def _is_about_link_before(error: ShoalError) -> bool:
    if isinstance(error, GapError | UnaskedOutputsError):
        return True
    return isinstance(error, RefusedError) and error.code in _QUESTIONABLE_CODES


def _is_about_links(error: ShoalError) -> bool:
    return _is_about_link_behind(error) or _is_about_link_before(error)


def _list_peers(segment: Sequence[LiveHop]) -> list[PeerId]:
    return [live.hop.peer.peer_id for live in segment]


def _read(output: Output, name: str) -> Tensor:
    output_BTH = from_wire(output.hidden)
    if not has_only_finite(output_BTH):
        raise RemoteProtocolError(f"{name} answered with NaN or infinity")
    return output_BTH
