"""The hops of one session: asking them, and rebuilding a lost one from its log."""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..kernels.compress import DTYPES, has_only_finite
from ..protocol.errors import (
    DirectoryError,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    SilentError,
    UnavailableError,
)
from ..protocol.ids import PeerId, SessionId
from ..protocol.limits import MAX_CONTROL_BYTES, MAX_FRAME_BYTES
from ..protocol.messages import Step
from ..protocol.net.clock import Clock
from ..protocol.net.transport import Transport
from ..protocol.recovery_log import RecoveryLog
from ..protocol.spans import Span
from ..protocol.tensors import ELEMENT_BYTES, WireDtype
from .blame import LostHopError, Refusals, blame
from .config import ClientConfig
from .farewells import Farewells
from .hop_link import HopLink
from .replay import merge_pieces
from .route_opening import LiveHop, RouteOpener, SessionFacts, Waiting, invert
from .router import Hop, Route
from .swarm import Fault, Swarm
from .tensors import from_wire, to_wire
from .trace import Kind, QuestionWatch, Recorder, choose_kind

_logger = logging.getLogger(__name__)

_MAX_PIECE_TOKENS = 2048

_RETRY_VIEW_SECONDS = 1.0
"""How old the view may be once a peer that was found in it has failed."""


@dataclass(frozen=True)
class Question:
    """What one hop is asked; see `messages.Step` for the fields."""

    hidden_BTH: Tensor
    position: int
    row_map: tuple[int, ...] | None = None
    is_decoded: bool = False
    last_token_only: bool = False


class LiveHops:
    """Talks to the peers of one session and counts its epochs and sequence numbers."""

    def __init__(
        self,
        facts: SessionFacts,
        swarm: Swarm,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
        farewells: Farewells,
    ) -> None:
        self.facts = facts
        self.clock = clock
        self._swarm = swarm
        self._config = config
        self._farewells = farewells
        self._opener = RouteOpener(facts, swarm, transport, clock, config)
        self._sequence = 0
        self._num_rows = 0

    @property
    def waiting(self) -> Waiting | None:
        """The peer that has no room for the session yet, for whoever watches."""
        return self._opener.waiting

    @property
    def recorder(self) -> Recorder | None:
        """Who takes down what the session does, if anybody."""
        return self._opener.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._opener.recorder = recorder

    def make_deadline(self) -> float:
        """Return until when lost hops may be replaced, from now."""
        return self.clock.now() + self._config.failover_timeout_seconds

    def rtt_seconds(self, peer_id: PeerId) -> float:
        """Return the round trip to a peer of a route, as last measured."""
        return self._swarm.rtt_seconds(peer_id) or 0.0

    def max_piece_tokens(self, num_rows: int) -> int:
        """Return how many tokens per row one frame should carry."""
        element_bytes = ELEMENT_BYTES[self._opener.wire_dtype or WireDtype.FP32]
        token_bytes = num_rows * self.facts.hidden_size * element_bytes
        piece_bytes = min(self._config.max_step_bytes, MAX_FRAME_BYTES - MAX_CONTROL_BYTES)
        return max(1, min(piece_bytes // token_bytes, _MAX_PIECE_TOKENS))

    async def ask(self, live: LiveHop, question: Question, is_replay: bool = False) -> Tensor:
        """Return a hop's checked answer to a question.

        Raises LostHopError when the hop has to be replaced.
        """
        peer = live.hop.peer
        if live.link is None:
            raise LostHopError(live.hop, "the hop was lost before")
        watch = self._watch(live.hop, question, is_replay)
        step = self._make_step(live.link.session, question)
        times = self._swarm.times(peer.peer_id)
        num_tokens = step.hidden.rows * step.hidden.tokens
        timeout_seconds = times.choose_timeout_seconds(
            num_tokens,
            invert(peer.decode_steps_per_second),
            invert(peer.prefill_tokens_per_second),
            peer.queue_seconds,
            self._swarm.times_of_others(peer.peer_id),
        )
        asked_at = self.clock.now()
        try:
            output_BTH = await self._exchange(live.link, step, timeout_seconds, watch)
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if watch is not None:
                watch.note_lost(error)
            await self.hang_up(live)
            raise blame(self._swarm, live.hop, error, self._opener.forgiven) from error
        except asyncio.CancelledError:
            await self.hang_up(live)  # a late answer would be taken for that of the next question
            raise
        self._swarm.note_answer(live.hop, num_tokens, self.clock.now() - asked_at)
        return output_BTH

    def _watch(self, hop: Hop, question: Question, is_replay: bool) -> QuestionWatch | None:
        if self.recorder is None:
            return None
        kind = Kind.REPLAY if is_replay else choose_kind(question.is_decoded)
        return self.recorder.watch(hop, kind, question.position, question.hidden_BTH.shape[1])

    async def _exchange(
        self, link: HopLink, step: Step, timeout_seconds: float, watch: QuestionWatch | None
    ) -> Tensor:
        """Return the checked answer to a step; the timeout is for what the peer does."""
        num_bytes = _count_bytes(step)
        line = self._swarm.line
        asked_at = self.clock.now()
        try:
            with line.carry(num_bytes) as carrying_seconds:
                output = await link.step(step, timeout_seconds, carrying_seconds, watch)
        except SilentError:
            line.note_silence(num_bytes)
            raise
        line.note_answer(num_bytes, self.clock.now() - asked_at)
        output_BTH = from_wire(output.hidden)
        if not has_only_finite(output_BTH):
            raise RemoteProtocolError(f"{link.name} answered with NaN or infinity")
        if watch is not None:
            watch.note_answered(output)
        return output_BTH

    async def hang_up(self, *lives: LiveHop) -> None:
        """Drop the links of hops, all of them before the first wait; their logs stay.

        The links are closed even when the caller is cancelled meanwhile.
        """
        links = [live.link for live in lives if live.link is not None]
        for live in lives:
            live.link = None
        await self._farewells.hang_up(links)

    def accuse(self, refusals: Refusals) -> None:
        """Avoid the peers that declined what another one has taken by now."""
        for hop in refusals.contradicted:
            self._swarm.quarantine(hop.peer, Fault.BROKEN)

    def to_wire_dtype(self, hidden_BTH: Tensor) -> Tensor:
        """Round hidden states to what travels, so that a log holds exactly what was sent."""
        assert self._opener.wire_dtype is not None  # chosen with the first route
        return hidden_BTH.to(DTYPES[self._opener.wire_dtype.name])

    async def cover(
        self,
        span: Span,
        log: RecoveryLog[Tensor],
        num_rows: int,
        deadline: float,
        refusals: Refusals,
        preferred: str | None = None,
    ) -> list[LiveHop]:
        """Open hops for a span and bring them to the state of the log, within the deadline.

        `preferred` is the weight format of the peer that was lost: its replica computes the
        same. Raises RouteError with the missing blocks, or the last failure, when time is up, and
        RefusedError when the peers that are there decline for good.
        """
        self._num_rows = num_rows
        configured = self._config.weights
        weights = (configured,) if configured else tuple(dict.fromkeys((preferred, None)))
        tried: set[PeerId] = set()
        pause_seconds = 0.05
        max_wait_seconds = 0.0
        while True:
            num_tried = len(tried)
            route = await self._find_route(
                span, weights, deadline, refusals, tried, is_failover=log.length > 0
            )
            if len(tried) < num_tried:
                # Everybody was asked once. Who is full may take us into its queue now; with some
                # time left for the others, who may have room sooner.
                remaining_seconds = max(0.0, deadline - self.clock.now())
                is_alone = num_tried == 1
                max_wait_seconds = remaining_seconds / (1 if is_alone else 2 * num_tried)
                pause_seconds = min(2 * pause_seconds, 1.0)  # nobody is to be stormed
            self._opener.begin(route)
            try:
                return await self._open_route(route, log, deadline, max_wait_seconds)
            except LostHopError as lost:
                tried.add(lost.hop.peer.peer_id)
                refusals.note(lost)
                remaining_seconds = deadline - self.clock.now()
                if remaining_seconds <= 0:
                    error = lost.__cause__
                    if isinstance(error, RefusedError):
                        raise error from None
                    raise RouteError(
                        f"no peer could be reached in time for blocks {lost.hop.span}: {lost}; "
                        "`shoal doctor` says what is wrong there",
                        (lost.hop.span,),
                    ) from error
            await asyncio.sleep(min(pause_seconds, remaining_seconds))

    async def fork(
        self, parent: "LiveHops", hops: Sequence[LiveHop], position: int, num_rows: int
    ) -> list[LiveHop]:
        """Open the hops of another session for one that begins with its first tokens.

        The logs share their tensors. A hop that cannot go on from what its peer holds has no link:
        the first step puts one there that gets the log in a replay.
        """
        self._num_rows = num_rows
        self._opener.begin_fork(parent._opener)
        twins = [LiveHop(live.hop, None, live.log.copy()) for live in hops]
        for twin in twins:
            twin.log.rollback(position)
        deadline = self.make_deadline()

        async def open_twin(twin: LiveHop, link: HopLink) -> None:
            try:
                await self._opener.open_link(twin, num_rows, deadline, parent=link.session)
            except LostHopError as lost:
                _logger.info("blocks %s get a replay: %s", twin.hop.span, lost)

        try:
            async with asyncio.TaskGroup() as tasks:
                for twin, live in zip(twins, hops, strict=True):
                    if live.link is not None:
                        tasks.create_task(open_twin(twin, live.link))
        except BaseException:
            await self.hang_up(*twins)
            raise
        return twins

    async def _find_route(
        self,
        span: Span,
        weights: Sequence[str | None],
        deadline: float,
        refusals: Refusals,
        tried: set[PeerId],
        is_failover: bool,
    ) -> Route:
        """Return the next route to try: over peers not tried yet, as long as there are any.

        Or else the busy one that is cheapest would be asked over and over, and others never. Then
        `tried` is emptied and the next round begins.

        Once a peer has declined for good, only others that are there now may help: who asked for
        too much should hear it at once, and that is what is raised.
        """
        # Somebody waits for the next token: the view at hand comes first, however old. If it led
        # to nobody, newcomers must be seen before silent peers are asked once more.
        max_age_seconds = math.inf if is_failover else self._config.refresh_seconds
        wait = functools.partial(
            self._swarm.wait_for_route,
            span,
            needed_kv_tokens=self.facts.count_kv_tokens(self._num_rows),
        )
        if tried:
            max_age_seconds = min(_RETRY_VIEW_SECONDS, self._config.refresh_seconds)
            with contextlib.suppress(RouteError, DirectoryError):
                avoided = {*tried, *refusals.peer_ids}
                return await wait(self.clock.now(), max_age_seconds, weights, avoided)
            tried.clear()
        if refusals.first is None:
            return await wait(deadline, max_age_seconds, weights)
        try:
            return await wait(self.clock.now(), 0.0, weights, refusals.peer_ids)
        except (RouteError, DirectoryError):
            raise refusals.first from None

    async def _open_route(
        self, route: Route, log: RecoveryLog[Tensor], deadline: float, max_wait_seconds: float
    ) -> list[LiveHop]:
        """Open all hops of a route at once, then replay the log through them in order."""
        hops = [LiveHop(hop, None, RecoveryLog()) for hop in route.hops]
        hops[0].log = log
        try:
            await self._opener.open(hops, self._num_rows, deadline, max_wait_seconds)
            await self._replay(hops)
        except BaseException:
            await self.hang_up(*hops)
            raise
        return hops

    async def _replay(self, hops: list[LiveHop]) -> None:
        """Send the first hop's log through all of them; each output is the next one's log."""
        for index, live in enumerate(hops):
            following = hops[index + 1] if index + 1 < len(hops) else None
            max_tokens = self.max_piece_tokens(self._num_rows)
            for piece in merge_pieces(live.log.plan_replay(), max_tokens):
                question = Question(
                    piece.hidden_BTH,
                    piece.position,
                    is_decoded=piece.is_decoded,
                    last_token_only=following is None,
                )
                output_BTH = await self.ask(live, question, is_replay=True)
                if following is not None:
                    following.log.append(
                        piece.position, output_BTH.shape[1], output_BTH, None, piece.is_decoded
                    )

    def _make_step(self, session: SessionId, question: Question) -> Step:
        assert self._opener.wire_dtype is not None
        self._sequence += 1
        return Step(
            session,
            self._opener.epoch,
            self._sequence,
            question.position,
            to_wire(question.hidden_BTH, self._opener.wire_dtype),
            question.row_map,
            question.is_decoded,
            question.last_token_only,
        )


def _count_bytes(step: Step) -> int:
    """Return how many bytes of hidden states a step brings to a peer and back."""
    num_bytes = len(step.hidden.data)
    return num_bytes + (num_bytes // step.hidden.tokens if step.last_token_only else num_bytes)
