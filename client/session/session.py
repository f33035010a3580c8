"""One generation over a route of hops, in chains or a star, that survives the loss of any of them.

The client keeps what it sent to every hop. When a hop is lost, only its span is routed anew: the
new peer gets the logged prefix in one replay, every other hop keeps its cache, and the step that
failed goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.wire_tensors import choose_decoded_dtype, has_only_finite
from ...protocol.errors import RouteError, UnavailableError, UsageError
from ...protocol.limits import MAX_BATCH_ROWS
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ..routing.route import WAS_LOST, Failures, Hop, LostHopError, Refusals
from ..trace.trace import Handoff, SessionFailover, choose_kind
from .exchange import Exchange, merge_pieces
from .hop_link import (
    BrokenSegmentError,
    HopLink,
    LiveHop,
    Mailbox,
    MissingHops,
    Question,
    StartOverError,
    cut_segments,
)
from .hops import HopFinder
from .pipeline import Pipeline, SegmentQueue, choose_piece_tokens
from .push_plan import PushPlan
from .state import SessionContext, StepProgress

_logger = logging.getLogger(__name__)

_UNKNOWN_SPEED = 1000.0
"""Tokens of a prompt per second, for a peer that does not announce it."""


class Reserve(Protocol):
    """Hops that can take the place of others at once; see `Replacements`."""

    @property
    def ready(self) -> list[LiveHop]: ...
    async def take_over(self, live: LiveHop, missing: MissingHops) -> LiveHop | None: ...
    def follow_hops(self) -> None: ...
    def drop(self) -> None: ...
    async def stop(self) -> None: ...


class RemoteSession:
    """One generation over the swarm: hidden states of the next tokens in, those behind the last
    block out. Owned by the client's loop; one step at a time.
    """

    def __init__(
        self, state: SessionContext, make_reserve: Callable[[RemoteSession], Reserve]
    ) -> None:
        """`make_reserve` returns what replaces hops that leave, and lost ones if it can."""
        self.state = state
        self.mailbox = Mailbox(lambda: state.last_sequence)
        self.finder = HopFinder(state, self.mailbox)
        self.exchange = Exchange(state, self.mailbox)
        self.plan = PushPlan(state, self.exchange, self.mailbox)
        self._hops: list[LiveHop] = []
        self._position = 0
        self._is_closed = False
        self._in_use = asyncio.Lock()
        self._cutoff: asyncio.Timeout | None = None  # of the step under way
        self._reserve = make_reserve(self)
        state.on_leaving = self._reserve.follow_hops
        self.failovers: list[SessionFailover] = []
        self.handoffs: list[Handoff] = []

    def __repr__(self) -> str:
        spans = ", ".join(str(live.hop.span) for live in self._hops) or "not opened"
        return f"<RemoteSession at {self._position} of {self.state.facts.max_tokens}, hops {spans}>"

    @property
    def position(self) -> int:
        """Index of the next token."""
        return self._position

    @property
    def live_hops(self) -> Sequence[LiveHop]:
        """The hops in use with their links and logs."""
        return self._hops

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops in use, in order; empty before the first step."""
        return tuple(live.hop for live in self._hops)

    @property
    def standbys(self) -> list[Hop]:
        """The hops for which a hot standby is ready to take over."""
        return [live.hop for live in self._reserve.ready]

    @property
    def spans_without_replica(self) -> tuple[Span, ...]:
        """The blocks for which a hop cannot have a standby."""
        used = {hop.peer.peer_id for hop in self.hops}
        return tuple(hop.span for hop in self.hops if not self.finder.has_replica(hop, used))

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; the peers hear of it with the next step."""
        if not 0 <= position <= self._position:
            raise UsageError(
                f"cannot go to position {position}: the session is at {self._position}"
            )
        self._position = position

    async def step(
        self,
        hidden_BTH: Tensor,
        row_map: Sequence[int] | None = None,
        is_decoded: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        """Send hidden states [B, T, H] through all blocks; return [B, T, H], or [B, 1, H].

        Lost hops are replaced on the way. Raises UsageError when the input cannot be part of the
        session, RefusedError when the peers decline, RouteError when nobody serves their blocks in
        time, or what the last of many peers did that were found and lost again. After an error the
        session is where it was and the same step may be tried again. UsageError, too, when the
        session is closed meanwhile.
        """
        self._check_input(hidden_BTH, row_map)
        moves = None if row_map is None else tuple(row_map)
        async with self._until_closed():
            question = Question(hidden_BTH, self._position, moves, is_decoded, last_token_only)
            with self._recording(question):
                await self._open(hidden_BTH.shape[0])
                outputs = await self._take(question)
            self._position += hidden_BTH.shape[1]
        if len(outputs) == 1 or last_token_only:
            return outputs[-1]
        return torch.cat(outputs, dim=1)

    def _recording(self, question: Question) -> AbstractContextManager[None]:
        if self.state.recorder is None:
            return nullcontext()
        kind, num_tokens = choose_kind(question.is_decoded), question.hidden_BTH.shape[1]
        return self.state.recorder.taking_step(kind, question.position, num_tokens)

    async def _open(self, num_rows: int) -> None:
        """Choose the hops and open the session there, with the first step."""
        if self._hops:
            return
        self.state.num_rows = num_rows
        missing = MissingHops(self.state.facts.span, RecoveryLog(), ())
        try:
            self._hops = await self._cover(missing, self.state.make_deadline(), Refusals())
        except BaseException:
            self.state.num_rows = 0
            raise

    async def _take(self, question: Question) -> list[Tensor]:
        """Take a step over all hops; from the first token on where nobody else kept those."""
        is_moving = question.row_map is not None
        before = [(live, live.log.copy()) for live in self._hops[: None if is_moving else 1]]
        deadline: float | None = None
        try:
            while True:
                self.state.progress = StepProgress(question.hidden_BTH.shape[1])
                try:
                    return await self._run(self._cut(question))
                except StartOverError as error:
                    _logger.info("the session replays all tokens from the first one: %s", error)
                    deadline = deadline or self.state.make_deadline()
                    if self.state.clock.now() > deadline:
                        message = "hops of the route were lost over and over"
                        raise UnavailableError(message) from error
                    await self.exchange.hang_up(*self._hops)
                    log, position = before[0][1].copy(), question.position
                    missing = MissingHops(self.state.facts.span, log, (), position=position)
                    self._hops = await self._cover(missing, deadline, Refusals())
        except BaseException:
            if is_moving:
                await self._restore(before)
            raise
        finally:
            self.state.progress = None

    async def _run(self, pieces: Sequence[Question]) -> list[Tensor]:
        """Take pieces over all hops, replacing those that are lost on the way.

        A hop that took one and is asked again, after an error of the step, rolls back first.
        """
        pipeline = Pipeline(self.state, self.exchange, self._hops, pieces)
        may_need_others = self.state.config.standby
        try:
            while broken := await pipeline.run():
                may_need_others = True
                for queue, error in broken:
                    await self._mend(pipeline, queue, error)
            return pipeline.outputs
        finally:
            self._hops = pipeline.hops
            self.exchange.end_step()
            if may_need_others or any(live.is_leaving for live in self._hops):
                self._reserve.follow_hops()

    def choose_piece_tokens(self) -> int:
        """Return how many tokens per row a piece of a prompt should have over the hops in use."""
        peers = [live.hop.peer for live in self._hops]
        alone = [live.hop for live in self._hops if not live.capability]
        return choose_piece_tokens(
            len(peers),
            self.state.num_rows,
            max(map(self.state.rtt_seconds, alone), default=0.0),
            min(peer.prefill_tokens_per_second or _UNKNOWN_SPEED for peer in peers),
            self.state.max_piece_tokens,
        )

    def _cut(self, question: Question) -> list[Question]:
        """Cut a step into pieces that travel one behind the other; the first moves the rows."""
        state = self.state
        assert state.wire_dtype is not None  # chosen with the first route
        # Rounded to what travels, so that a log holds exactly what was sent. What becomes int8
        # becomes the same bytes each time it is sent, and is not rounded twice.
        hidden_BTH = question.hidden_BTH.to(choose_decoded_dtype(state.wire_dtype.name))
        num_tokens = hidden_BTH.shape[1]
        parts = hidden_BTH.split(1 if num_tokens == 1 else self.choose_piece_tokens(), dim=1)
        positions = accumulate((part.shape[1] for part in parts), initial=question.position)
        # The same numbers at all hops.
        first, state.last_sequence = state.last_sequence + 1, state.last_sequence + len(parts)
        sequences = range(first, state.last_sequence + 1)
        return [
            replace(
                question,
                hidden_BTH=part,
                position=position,
                row_map=question.row_map if part is parts[0] else None,
                is_piece=len(parts) > 1,
                sequence=sequence,
            )
            for part, position, sequence in zip(parts, positions, sequences, strict=False)
        ]

    async def _mend(
        self, pipeline: Pipeline, queue: SegmentQueue, error: BrokenSegmentError
    ) -> None:
        """Put other hops, with the same cache, into the place of lost ones."""
        failures = queue.note_failures(self.state)
        while True:
            for lost in error.lost:
                failures.refusals.note(lost)
            await failures.retry.pause()
            failures.retry.note_failure()
            if failures.retry.remaining_seconds <= 0:
                # Replacements were found and lost again, over and over.
                failure = error.lost[0] if error.lost else UnavailableError(str(error))
                raise failure.__cause__ or failure
            try:
                if error.link is not None:
                    await self._bridge(pipeline, queue, error.link)
                while (run := queue.find_lost()) is not None:
                    await self._replace(pipeline, queue, run, error, failures)
                return
            except BrokenSegmentError as more:
                error = more

    async def _bridge(self, pipeline: Pipeline, queue: SegmentQueue, index: int) -> None:
        """Stand between two hops that live and do not reach each other."""
        before, after = queue.hops[index : index + 2]
        await self.plan.bridge(before, after, queue.pending, queue.position, queue.newest_sequence)
        pipeline.replace(queue, 0, 0, ())
        _logger.info(
            "the client now carries hidden states to blocks from %d on: the hop before cannot push",
            after.hop.span.start,
        )

    async def _replace(
        self,
        pipeline: Pipeline,
        queue: SegmentQueue,
        run: tuple[int, int],
        error: BrokenSegmentError,
        failures: Failures,
    ) -> None:
        """Put hops into the place of some that stand side by side."""
        start, stop = run
        lost, started_at = queue.hops[start:stop], self.state.clock.now()
        if start == 0 and not lost[0].is_log_whole:
            raise StartOverError
        missing = queue.find_missing(start, stop)
        standby, num_tokens = None, 0
        if len(lost) == 1:
            standby = await self._reserve.take_over(lost[0], missing)
        replacements = [] if standby is None else [standby]
        if not replacements:
            self.state.sought = missing.span
            try:
                weights, deadline = lost[0].hop.peer.weights, failures.retry.deadline
                replacements = await self._cover(missing, deadline, failures.refusals, weights)
            except RouteError as unserved:
                leaving = missing.leaving_neighbours
                if not leaving:
                    raise
                # A peer that moves here from the next blocks would wait for this very session.
                await self.exchange.hang_up(*leaving)
                given_up = [LostHopError(live.hop, "its peer is leaving") for live in leaving]
                given_up[0].__cause__ = unserved
                raise BrokenSegmentError(given_up) from None
            finally:
                self.state.sought = None
            num_tokens = missing.log.length if start == 0 else missing.position
        pipeline.replace(queue, start, stop, replacements)
        reasons = {reason.hop: reason for reason in error.lost}
        for live in lost:
            reason = reasons.get(live.hop)
            failover = SessionFailover(
                live.hop,
                str(reason or error),
                WAS_LOST if reason is None else reason.what_happened,
                tuple(replacement.hop for replacement in replacements),
                missing.position,
                num_tokens,
                self.state.clock.now() - started_at,
            )
            self._note_failover(failover, started_at)

    def note_handoff(self, handoff: Handoff, started_at: float) -> None:
        """Note that a hop was moved to another peer, between two steps."""
        self.handoffs.append(handoff)
        if self.state.recorder is not None:
            self.state.recorder.note_handoff(handoff, started_at)

    def _note_failover(self, failover: SessionFailover, started_at: float) -> None:
        self.failovers.append(failover)
        if self.state.recorder is not None:
            self.state.recorder.note_failover(failover, started_at)
        _logger.info(
            "replaced the hop of blocks %s at token %d: %s",
            failover.lost.span,
            failover.position,
            failover.reason,
        )

    async def _cover(
        self,
        missing: MissingHops,
        deadline: float,
        refusals: Refusals,
        preferred: str | None = None,
    ) -> list[LiveHop]:
        """Return new hops for missing ones, as `HopFinder.cover` does.

        BrokenSegmentError says that a hop before or after is lost, too, and StartOverError that no
        log will do.
        """
        return await self.finder.cover(missing, deadline, refusals, self._bring_up, preferred)

    async def _bring_up(
        self, hops: list[LiveHop], missing: MissingHops, deadline: float, max_wait_seconds: float
    ) -> None:
        """Open all hops of a route at once, then have them computed what is behind us."""
        if missing.before is None:
            hops[0].log = missing.log
        self.plan.plan(hops, missing)
        try:
            await self.finder.open(hops, deadline, max_wait_seconds)
            try:
                await self.plan.admit(missing)
                if missing.before is None:
                    await self._replay(hops)
                else:
                    await self._have_replayed(missing, hops)
            except BrokenSegmentError as broken:
                if any(live.link is None for live in missing.neighbours):
                    raise
                # Two of them that cannot reach each other are not linked the next time.
                raise (
                    broken.lost[0] if broken.lost else LostHopError(hops[0].hop, str(broken))
                ) from broken
        except BaseException:
            await self.exchange.hang_up(*hops)
            raise

    async def _replay(self, hops: Sequence[LiveHop]) -> None:
        """Send the first hop's log through all; what comes out of a segment is the next one's."""
        segments = cut_segments(hops)
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            pieces, is_last = segment[0].log.plan_replay(), following is None
            for question in merge_pieces(pieces, self.state.max_piece_tokens, is_last):
                with self._noting_broken_links(segment):
                    output_BTH = await self.exchange.ask(segment, question, is_replay=True)
                if following is not None:
                    num_tokens, is_decoded = output_BTH.shape[1], question.is_decoded
                    following[0].log.append(
                        question.position, num_tokens, output_BTH, None, is_decoded
                    )

    async def _have_replayed(self, missing: MissingHops, hops: Sequence[LiveHop]) -> None:
        """Have the hop before push to new ones what it has pushed to the lost ones."""
        assert missing.before is not None
        session = hops[-1].open_link.session
        self.mailbox.expect_replay(session)
        num_steps = await self.plan.redirect_to(hops, missing)
        if num_steps:
            segment = [missing.before, *hops]
            with self._noting_broken_links(segment):
                num_tokens = self.state.num_rows * missing.position
                await self.exchange.wait_for_replay(segment, num_steps, num_tokens)
        self.mailbox.end_replay(session)

    @contextmanager
    def _noting_broken_links(self, segment: Sequence[LiveHop]) -> Iterator[None]:
        """Remember the link between two hops that turn out not to reach each other."""
        try:
            yield
        except BrokenSegmentError as broken:
            if broken.link is not None:
                self.plan.note_broken_link(segment[broken.link], segment[broken.link + 1])
            raise

    async def fork_into(self, fork: RemoteSession, position: int) -> None:
        """Let a session that has not begun begin with the first `position` tokens of this one.

        Its hops are those of this one, where the peers copy what they hold. A hop whose peer does
        not has no link: the first step puts one there that gets the log in a replay. The logs share
        their tensors. Raises UsageError when there are fewer tokens, and when this session is
        closed, or is meanwhile.
        """
        async with self._until_closed():
            if not 0 <= position <= self._position:
                raise UsageError(
                    f"cannot fork at token {position}: the session is at {self._position}"
                )
            if position == 0:
                return
            fork.state.begin_fork(self.state)
            hops = [
                LiveHop(live.hop, live.log.copy(), feeds=live.feeds, is_log_whole=live.is_log_whole)
                for live in self._hops
            ]
            for live in hops:
                live.log.rollback(min(position, live.log.length))
            await fork._open_fork(hops, self._hops, position)
            fork._hops, fork._position = hops, position

    async def _open_fork(
        self, hops: Sequence[LiveHop], parents: Sequence[LiveHop], position: int
    ) -> None:
        """Open hops with the first tokens of what other sessions hold at the same peers."""
        self.plan.connect(hops)
        deadline = self.state.make_deadline()

        async def open_hop(live: LiveHop, link: HopLink) -> None:
            try:
                await self.finder.open_link(
                    live, deadline, parent=link.session, prefix_tokens=position
                )
            except LostHopError as lost:
                _logger.info("the fork of blocks %s will be replayed: %s", live.hop.span, lost)

        try:
            async with asyncio.TaskGroup() as tasks:
                for live, parent in zip(hops, parents, strict=True):
                    if parent.link is not None:
                        tasks.create_task(open_hop(live, parent.link))
        except BaseException:
            await self.exchange.hang_up(*hops)
            raise

    async def _restore(self, before: Sequence[tuple[LiveHop, RecoveryLog[Tensor]]]) -> None:
        """Go back to the hops and logs before a step that moved rows and failed.

        A peer cannot undo a row map: every hop that may have applied it gets a replay instead.
        """
        self._reserve.drop()
        used, self._hops = self._hops, [live for live, _ in before]
        for live, log in before:
            live.log = log
        await self.exchange.hang_up(*used, *self._hops)

    @asynccontextmanager
    async def _until_closed(self) -> AsyncIterator[None]:
        """Cut short what runs inside when the session is closed; nobody is blamed for that."""
        async with self._in_use:
            self._check_open()
            try:
                async with asyncio.timeout(None) as self._cutoff:
                    yield
            except TimeoutError:
                raise UsageError("the session was closed meanwhile; open a new one") from None
            finally:
                self._cutoff = None
                if self._is_closed:
                    await self._hang_up()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[list[LiveHop]]:
        """Hold up the next step; gives the hops, and those that are in it afterwards are used."""
        async with self._in_use:
            yield self._hops

    async def close(self) -> None:
        """End a step that is under way, then free the caches on all hops.

        Never raises; the session cannot be used afterwards.
        """
        self._is_closed = True
        if self._cutoff is not None:
            self._cutoff.reschedule(asyncio.get_running_loop().time())
            self._cutoff = None
        await self._reserve.stop()
        async with self._in_use:
            await self._hang_up()
            await self._reserve.stop()  # what the step gave up

    async def _hang_up(self) -> None:
        hops, self._hops = self._hops, []
        await self.exchange.hang_up(*hops)

    def check_rows(self, num_rows: int, row_map: Sequence[int] | None) -> None:
        """Raise UsageError unless a step of so many rows can be part of the session."""
        if num_rows > MAX_BATCH_ROWS:
            raise UsageError(f"a session has at most {MAX_BATCH_ROWS} rows, not {num_rows}")
        if self.state.num_rows and num_rows != self.state.num_rows:
            raise UsageError(f"the session has {self.state.num_rows} rows, the step has {num_rows}")
        if row_map is not None and (
            len(row_map) != num_rows or not all(0 <= row < num_rows for row in row_map)
        ):
            raise UsageError(
                f"hypo_ids must name for each of the {num_rows} rows the one whose prefix it "
                f"continues, 0 to {num_rows - 1}, not {list(row_map)}"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the session is closed; open a new one")

    def _check_input(self, hidden_BTH: Tensor, row_map: Sequence[int] | None) -> None:
        self._check_open()
        if hidden_BTH.dim() != 3 or hidden_BTH.shape[2] != self.state.facts.hidden_size:
            raise UsageError(
                f"hidden states must have shape [rows, tokens, {self.state.facts.hidden_size}], "
                f"got {list(hidden_BTH.shape)}"
            )
        num_rows, num_tokens, _ = hidden_BTH.shape
        if num_rows == 0 or num_tokens == 0:
            raise UsageError("a step needs at least one row and one token")
        self.check_rows(num_rows, row_map)
        if not hidden_BTH.is_floating_point():
            raise UsageError(
                f"hidden states must be floating point numbers, not {hidden_BTH.dtype}"
            )
        if self._position + num_tokens > self.state.facts.max_tokens:
            raise UsageError(
                f"Maximum length exceeded: {self._position} tokens and {num_tokens} new ones are "
                f"more than the session's {self.state.facts.max_tokens}"
            )
        if not has_only_finite(hidden_BTH):
            raise UsageError("the hidden states contain NaN or infinity")
