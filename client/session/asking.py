"""Asks the hops of one session: one of them, or a segment that passes a step along itself."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels.wire_tensors import has_only_finite
from ...protocol.errors import RefusedError, RemoteProtocolError, SilentError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.messages.session import Output, Step
from ...protocol.net.clock import Clock
from ..routing.blame import LostHopError, blame
from ..routing.deadlines import FLOOR_SECONDS
from ..routing.router import Hop
from ..routing.swarm import Swarm
from ..trace.trace import Kind, QuestionWatch, choose_kind
from .chain import Chain, ChainFault, choose_probe_seconds
from .farewells import Farewells
from .hop_link import HopLink
from .mailbox import Arrived
from .route_opening import LiveHop, RouteOpener, invert
from .tensors import from_wire, to_wire

_BROKEN = (UnavailableError, RemoteProtocolError, RefusedError)
"""What costs a hop its place."""


@dataclass(frozen=True)
class Question:
    """What a segment is asked; see `messages.Step` for the fields."""

    hidden_BTH: Tensor
    position: int
    row_map: tuple[int, ...] | None = None
    is_decoded: bool = False
    last_token_only: bool = False
    is_piece: bool = False
    sequence: int = 0


class BrokenSegmentError(Exception):
    """Hops of a segment were lost, or the link behind the one at index `cut`."""

    def __init__(self, lost: Sequence[LostHopError], cut: int | None = None) -> None:
        super().__init__(str(lost[0]) if lost else "a link between two peers does not work")
        self.lost = lost
        self.cut = cut


@dataclass
class _Asked:
    """A question that is under way through a segment of a chain."""

    step: Step
    asked_at: float
    watch: QuestionWatch | None
    carrying_seconds: float
    """What our own line needs, there and back."""
    pushing_seconds: float
    """What the links between the hops need, one after the other."""
    carrying: ExitStack
    is_disturbed: bool = False
    """Hops were lost meanwhile: the time until the answer says nothing of those that answer."""


class Asking:
    """Talks to the peers of one session."""

    def __init__(
        self, opener: RouteOpener, swarm: Swarm, clock: Clock, farewells: Farewells
    ) -> None:
        self._opener = opener
        self._swarm = swarm
        self._clock = clock
        self._farewells = farewells
        self._asked: dict[int, _Asked] = {}

    async def ask(
        self, segment: Sequence[LiveHop], question: Question, is_replay: bool = False
    ) -> Tensor:
        """Return a segment's checked answer to a question. Raises BrokenSegmentError."""
        self.check_links(segment)
        if segment[0].capability:
            await self.send(segment, question, is_replay)
            return await self.receive(segment, question)
        return await self._ask_alone(segment[0], question, is_replay)

    def check_links(self, segment: Sequence[LiveHop]) -> None:
        """Raise BrokenSegmentError for the hops that were lost before."""
        lost = [live for live in segment if live.link is None]
        if lost:
            raise BrokenSegmentError(
                [LostHopError(live.hop, "the hop was lost before") for live in lost]
            )

    async def _ask_alone(self, live: LiveHop, question: Question, is_replay: bool) -> Tensor:
        link = _get_link(live)
        watch = self._watch(live.hop, question, is_replay)
        step = self._make_step(link, question)
        num_tokens = step.hidden.rows * step.hidden.tokens
        timeout_seconds = self.choose_timeout_seconds([live], num_tokens)
        asked_at = self._clock.now()
        try:
            output_BTH = await self._exchange(link, step, timeout_seconds, watch)
        except _BROKEN as error:
            if watch is not None:
                watch.note_lost(error)
            raise BrokenSegmentError([await self.lose(live, error)]) from error
        except asyncio.CancelledError:
            await self.hang_up(live)  # a late answer would be taken for that of the next question
            raise
        self._swarm.note_answer(live.hop, num_tokens, self._clock.now() - asked_at)
        return output_BTH

    async def _exchange(
        self, link: HopLink, step: Step, timeout_seconds: float, watch: QuestionWatch | None
    ) -> Tensor:
        """Return the checked answer to a step; the timeout is for what the peer does."""
        num_bytes = _count_bytes(step)
        line = self._swarm.line
        asked_at = self._clock.now()
        try:
            with line.carry(num_bytes) as carrying_seconds:
                output = await link.step(step, timeout_seconds, carrying_seconds, watch)
        except SilentError:
            line.note_silence(num_bytes)
            raise
        line.note_answer(num_bytes, self._clock.now() - asked_at)
        output_BTH = _read(output, link)
        if watch is not None:
            watch.note_answered(output)
        return output_BTH

    async def send(
        self, segment: Sequence[LiveHop], question: Question, is_replay: bool = False
    ) -> None:
        """Send a question into a chain; its answer is received later. Raises BrokenSegmentError."""
        self.check_links(segment)
        link = _get_link(segment[0])
        watch = self._watch(segment[0].hop, question, is_replay)
        step = self._make_step(link, question)
        carrying = ExitStack()
        self.forget(question)
        carrying_seconds = carrying.enter_context(self._swarm.line.carry(_count_bytes(step)))
        pushing_seconds = carrying.enter_context(
            self._swarm.links.carry(_list_peers(segment), len(step.hidden.data))
        )
        asked = _Asked(step, self._clock.now(), watch, carrying_seconds, pushing_seconds, carrying)
        self._asked[question.sequence] = asked
        timeout_seconds = self.choose_timeout_seconds(segment[:1], step.hidden.tokens)
        try:
            num_bytes = await self._chain(segment).send(step, timeout_seconds, carrying_seconds)
        except ChainFault as fault:
            raise await self._break(segment, fault, watch) from fault
        if watch is not None:
            watch.note_encoded(num_bytes)

    async def receive(self, segment: Sequence[LiveHop], question: Question) -> Tensor:
        """Return the checked answer to a question that was sent. Raises BrokenSegmentError."""
        self.check_links(segment)
        asked = self._asked[question.sequence]
        step, watch, last = asked.step, asked.watch, _get_link(segment[-1])
        num_tokens = step.hidden.rows * step.hidden.tokens
        timeout_seconds = self.choose_timeout_seconds(segment, num_tokens)
        try:
            try:
                arrived = await self._chain(segment).receive(
                    last.session,
                    step.sequence,
                    timeout_seconds + asked.carrying_seconds,
                    asked.pushing_seconds,
                )
                if watch is not None:
                    watch.note_arrived(arrived.num_bytes)
                last.check_output(replace(step, session=last.session), arrived.output)
                output_BTH = _read(arrived.output, last)
            except RemoteProtocolError as error:
                raise ChainFault({len(segment) - 1: error}) from error
        except ChainFault as fault:
            raise await self._break(segment, fault, watch) from fault
        self.forget(question)
        self._note_answer(segment, asked, arrived)
        return output_BTH

    def forget(self, question: Question) -> None:
        """Note that nobody waits for the answer to a question any more."""
        asked = self._asked.pop(question.sequence, None)
        if asked is not None:
            asked.carrying.close()

    def end_step(self) -> None:
        """Forget every question: the step they belong to is over."""
        for asked in self._asked.values():
            asked.carrying.close()
        self._asked.clear()
        self._opener.mailbox.forget_steps()

    async def wait_for_replay(
        self, segment: Sequence[LiveHop], num_steps: int, num_tokens: int
    ) -> None:
        """Wait until the hops of a segment have done a replay that the first of them pushes."""
        timeout_seconds = self.choose_timeout_seconds(segment, num_tokens)
        session = _get_link(segment[-1]).session
        try:
            with self.pushing(segment, num_tokens) as pushing_seconds:
                await self._chain(segment).receive(
                    session, num_steps, timeout_seconds, pushing_seconds
                )
        except ChainFault as fault:
            raise await self._break(segment, fault, None) from fault

    def pushing(self, segment: Sequence[LiveHop], num_tokens: int) -> AbstractContextManager[float]:
        """Count tokens as pushed from each hop to the next; gives the seconds that may take.

        How fast the links are, that does not tell: much may have arrived before anybody waits.
        """
        return self._swarm.links.carry(_list_peers(segment), self._opener.count_bytes(num_tokens))

    async def hang_up(self, *lives: LiveHop) -> None:
        """Drop the links of hops, all of them before the first wait; their logs stay.

        The links are closed even when the caller is cancelled meanwhile.
        """
        links = [live.link for live in lives if live.link is not None]
        for live in lives:
            live.link = None
        for link in links:
            self._opener.mailbox.forget(link.session)
        await self._farewells.hang_up(links)

    async def lose(
        self, live: LiveHop, error: UnavailableError | RemoteProtocolError | RefusedError
    ) -> LostHopError:
        """Hang up on a hop and blame its peer; return what to raise."""
        await self.hang_up(live)
        lost = blame(self._swarm, live.hop, error, self._opener.forgiven)
        lost.__cause__ = error
        return lost

    async def _break(
        self, segment: Sequence[LiveHop], fault: ChainFault, watch: QuestionWatch | None
    ) -> BrokenSegmentError:
        if watch is not None:
            watch.note_lost(fault)
        for asked in self._asked.values():
            asked.is_disturbed = True
        lost: list[LostHopError] = []
        for index, error in fault.lost.items():
            assert isinstance(error, _BROKEN)
            lost.append(await self.lose(segment[index], error))
        return BrokenSegmentError(lost, fault.cut)

    def _chain(self, segment: Sequence[LiveHop]) -> Chain:
        links = [_get_link(live) for live in segment]
        rtts = [self._swarm.rtt_seconds(live.hop.peer.peer_id) or 0.0 for live in segment]
        probe_seconds = choose_probe_seconds(max(rtts))
        return Chain(links, self._opener.mailbox, self._clock, probe_seconds)

    def _note_answer(self, segment: Sequence[LiveHop], asked: _Asked, arrived: Arrived) -> None:
        """Share the time that a step took out among the hops, as far as they tell.

        A piece of a prompt is sent behind others: what those took is not its own, and a short last
        one would make its hops look slow for steps of few tokens.
        """
        now, last = self._clock.now(), segment[-1]
        began_at, last.answered_at = max(asked.asked_at, last.answered_at), now
        num_tokens = asked.step.hidden.rows * asked.step.hidden.tokens
        output = arrived.output
        hops = [live.hop for live in segment]
        expected_seconds = self._swarm.expect_way_seconds(hops)
        if asked.watch is not None:
            asked.watch.note_passed(hops, output, expected_seconds)
        if asked.is_disturbed:
            return
        carried_seconds = now - asked.asked_at
        self._swarm.line.note_answer(_count_bytes(asked.step), carried_seconds)
        num_bytes = len(asked.step.hidden.data)
        self._swarm.links.note_answer(_list_peers(segment), num_bytes, carried_seconds)
        seconds = now - began_at
        told = [sum(times) for times in output.before]
        told.append(output.queue_seconds + output.compute_seconds)
        if len(told) == len(segment):  # not so where a hop was replaced meanwhile
            way_seconds = max(0.0, seconds - sum(told)) / len(segment)
            for live, own_seconds in zip(segment, told, strict=True):
                hop_seconds = min(own_seconds, seconds) + way_seconds
                self._swarm.note_answer(
                    live.hop, num_tokens, hop_seconds, sum(expected_seconds) / len(segment)
                )

    def _watch(self, hop: Hop, question: Question, is_replay: bool) -> QuestionWatch | None:
        recorder = self._opener.recorder
        if recorder is None:
            return None
        kind = Kind.REPLAY if is_replay else choose_kind(question.is_decoded)
        return recorder.watch(hop, kind, question.position, question.hidden_BTH.shape[1])

    def choose_timeout_seconds(self, segment: Sequence[LiveHop], num_tokens: int) -> float:
        """Return how long the hops may take, one after the other."""
        seconds = FLOOR_SECONDS
        for live in segment:
            peer = live.hop.peer
            seconds -= FLOOR_SECONDS  # what a busy machine gets in any case, but once
            seconds += self._swarm.times(peer.peer_id).choose_timeout_seconds(
                num_tokens,
                invert(peer.decode_steps_per_second),
                invert(peer.prefill_tokens_per_second),
                peer.queue_seconds,
                self._swarm.times_of_others(peer.peer_id),
            )
        return seconds

    def _make_step(self, link: HopLink, question: Question) -> Step:
        assert self._opener.wire_dtype is not None
        return Step(
            link.session,
            self._opener.epoch,
            question.sequence,
            question.position,
            to_wire(question.hidden_BTH, self._opener.wire_dtype),
            question.row_map,
            question.is_decoded,
            question.last_token_only,
            question.is_piece and bool(link.capability),
        )


def _get_link(live: LiveHop) -> HopLink:
    assert live.link is not None  # see `check_links`
    return live.link


def _list_peers(segment: Sequence[LiveHop]) -> list[PeerId]:
    return [live.hop.peer.peer_id for live in segment]


def _read(output: Output, link: HopLink) -> Tensor:
    output_BTH = from_wire(output.hidden)
    if not has_only_finite(output_BTH):
        raise RemoteProtocolError(f"{link.name} answered with NaN or infinity")
    return output_BTH


def _count_bytes(step: Step) -> int:
    """Return how many bytes of hidden states a step brings to a peer and back."""
    num_bytes = len(step.hidden.data)
    return num_bytes + (num_bytes // step.hidden.tokens if step.last_token_only else num_bytes)
