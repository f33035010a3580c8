"""Drives one session over a route, in chains or a star, and survives the loss of any hop.

The client keeps what it sent to every hop. When a hop is lost, only its span is routed anew: the
new peer gets the logged prefix in one replay, every other hop keeps its cache, and the step that
failed goes on where it stopped.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels.wire_tensors import has_only_finite
from ...protocol.errors import UnavailableError, UsageError
from ...protocol.limits import MAX_BATCH_ROWS
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ..routing.blame import Refusals
from ..routing.router import Hop
from ..trace.trace import Recorder, choose_kind
from .asking import Question
from .handoff import Handoff, Mover
from .live_hops import LiveHops, Place
from .mending import Failover, Mender
from .pipeline import Pipeline, choose_piece_tokens
from .route_opening import LiveHop, Waiting
from .standby import Standbys
from .wiring import StartOverError

_logger = logging.getLogger(__name__)

_UNKNOWN_SPEED = 1000.0
"""Tokens of a prompt per second, for a peer that does not announce it."""


class RemoteSession:
    """One generation over the swarm: hidden states of the next tokens in, those behind the last
    block out. Owned by the client's loop; one step at a time.
    """

    def __init__(self, driver: LiveHops) -> None:
        self._driver = driver
        self._facts = driver.facts
        self._clock = driver.clock
        self._hops: list[LiveHop] = []
        self._position = 0
        self._num_rows = 0
        self._is_closed = False
        self._in_use = asyncio.Lock()
        self._cutoff: asyncio.Timeout | None = None  # of the step under way
        self._mover = Mover(driver, self)
        self._standbys = Standbys(driver, self) if driver.wants_standbys else None
        self.failovers: list[Failover] = []

    def __repr__(self) -> str:
        spans = ", ".join(str(live.hop.span) for live in self._hops) or "not opened"
        return f"<RemoteSession at {self._position} of {self._facts.max_tokens}, hops {spans}>"

    @property
    def position(self) -> int:
        """Index of the next token."""
        return self._position

    @property
    def max_tokens(self) -> int:
        """Tokens per row that the session may hold."""
        return self._facts.max_tokens

    @property
    def span(self) -> Span:
        """The blocks that it goes through."""
        return self._facts.span

    @property
    def prompts_LBPH(self) -> Tensor | None:
        """What peers add to the inputs of blocks at the first P positions; set before the hops."""
        return self._driver.prompts_LBPH

    @prompts_LBPH.setter
    def prompts_LBPH(self, prompts_LBPH: Tensor | None) -> None:
        self._driver.prompts_LBPH = prompts_LBPH

    @property
    def waiting(self) -> Waiting | None:
        """The peer that has no room for the session yet, and how long it expects that to last."""
        return self._driver.waiting

    @property
    def sought(self) -> Span | None:
        """The blocks that were lost and that no peer has taken over yet."""
        return self._driver.sought

    @property
    def spans_without_replica(self) -> tuple[Span, ...]:
        """The blocks for which a hop cannot have a standby."""
        used = {hop.peer.peer_id for hop in self.hops}
        return tuple(hop.span for hop in self.hops if not self._driver.has_replica(hop, used))

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops in use, in order; empty before the first step."""
        return tuple(live.hop for live in self._hops)

    @property
    def handoffs(self) -> list[Handoff]:
        """Every planned change of hop so far."""
        return self._mover.handoffs

    @property
    def standbys(self) -> list[Hop]:
        """The hops for which a hot standby is ready to take over."""
        return [] if self._standbys is None else [live.hop for live in self._standbys.ready]

    def record(self, recorder: Recorder | None) -> None:
        """Have everything taken down that the session does from now on; None: nothing more."""
        self._driver.recorder = recorder

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; the peers hear of it with the next step."""
        if not 0 <= position <= self._position:
            raise UsageError(
                f"cannot go to position {position}: the session is at {self._position}"
            )
        self._position = position

    async def fork_into(self, twin: "RemoteSession", position: int) -> None:
        """Let a session that has not begun begin with the first `position` tokens of this one.

        Its hops are those of this one, where the peers copy what they hold; where one does not,
        the first step replays the log. Raises UsageError when there are fewer tokens, and when this
        session is closed, or is meanwhile.
        """
        async with self._until_closed():
            if not 0 <= position <= self._position:
                raise UsageError(
                    f"cannot fork at token {position}: the session is at {self._position}"
                )
            if position == 0:
                return
            twin._hops = await twin._driver.fork(self._driver, self._hops, position, self._num_rows)
            twin._num_rows, twin._position = self._num_rows, position

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
        time, or what the last of many peers did
        that were found and lost again. After an error the session is where it was and the same
        step may be tried again. UsageError, too, when the session is closed meanwhile.
        """
        self._check_input(hidden_BTH, row_map)
        async with self._until_closed():
            recorder = self._driver.recorder
            if recorder is None:
                return await self._step(hidden_BTH, row_map, is_decoded, last_token_only)
            kind, num_tokens = choose_kind(is_decoded), hidden_BTH.shape[1]
            with recorder.taking_step(kind, self._position, num_tokens):
                return await self._step(hidden_BTH, row_map, is_decoded, last_token_only)

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

    async def _step(
        self,
        hidden_BTH: Tensor,
        row_map: Sequence[int] | None,
        is_decoded: bool,
        last_token_only: bool,
    ) -> Tensor:
        await self._open(hidden_BTH.shape[0])
        before = [] if row_map is None else [(live, live.log.copy()) for live in self._hops]
        moves = None if row_map is None else tuple(row_map)
        question = Question(hidden_BTH, self._position, moves, is_decoded, last_token_only)
        try:
            outputs = await self._take(question)
        except BaseException:
            if row_map is not None:
                await self._restore(before)
            raise
        self._position += hidden_BTH.shape[1]
        if len(outputs) == 1 or last_token_only:
            return outputs[-1]
        return torch.cat(outputs, dim=1)

    async def _open(self, num_rows: int) -> None:
        """Choose the hops and open the session there, with the first step."""
        if not self._hops:
            place = Place(self._facts.span, RecoveryLog(), ())
            self._hops = await self._driver.cover(
                place, num_rows, self._driver.make_deadline(), Refusals()
            )
            self._num_rows = num_rows

    def choose_piece_tokens(self) -> int:
        """Return how many tokens per row a piece of a prompt should have over the hops in use."""
        peers = [live.hop.peer for live in self._hops]
        alone = [live.hop.peer.peer_id for live in self._hops if not live.capability]
        return choose_piece_tokens(
            len(peers),
            self._num_rows,
            max(map(self._driver.rtt_seconds, alone), default=0.0),
            min(peer.prefill_tokens_per_second or _UNKNOWN_SPEED for peer in peers),
            self._driver.max_piece_tokens(self._num_rows),
        )

    def _cut(self, question: Question) -> list[Question]:
        """Cut a step into pieces that travel one behind the other; the first moves the rows."""
        hidden_BTH = self._driver.to_wire_dtype(question.hidden_BTH)
        parts = hidden_BTH.split(self.choose_piece_tokens(), dim=1)
        positions = accumulate((part.shape[1] for part in parts), initial=question.position)
        sequences = self._driver.number_steps(len(parts))
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

    async def _restore(self, before: Sequence[tuple[LiveHop, RecoveryLog[Tensor]]]) -> None:
        """Go back to the hops and logs before a step that moved rows and failed.

        A peer cannot undo a row map: every hop that may have applied it gets a replay instead.
        """
        if self._standbys is not None:
            self._standbys.drop()
        used, self._hops = self._hops, [live for live, _ in before]
        for live, log in before:
            live.log = log
        await self._driver.hang_up(*used, *self._hops)

    async def close(self) -> None:
        """End a step that is under way, then free the caches on all hops.

        Never raises; the session cannot be used afterwards.
        """
        self._is_closed = True
        if self._cutoff is not None:
            self._cutoff.reschedule(asyncio.get_running_loop().time())
            self._cutoff = None
        await self._mover.stop()
        if self._standbys is not None:
            await self._standbys.stop()
        async with self._in_use:
            await self._hang_up()
            if self._standbys is not None:
                await self._standbys.stop()  # those that the step gave up

    async def _hang_up(self) -> None:
        hops, self._hops = self._hops, []
        await self._driver.hang_up(*hops)

    def check_rows(self, num_rows: int, row_map: Sequence[int] | None) -> None:
        """Raise UsageError unless a step of so many rows can be part of the session."""
        if num_rows > MAX_BATCH_ROWS:
            raise UsageError(f"a session has at most {MAX_BATCH_ROWS} rows, not {num_rows}")
        if self._num_rows and num_rows != self._num_rows:
            raise UsageError(f"the session has {self._num_rows} rows, the step has {num_rows}")
        if row_map is not None and (
            len(row_map) != num_rows or not all(0 <= row < num_rows for row in row_map)
        ):
            raise UsageError(f"a row map for {num_rows} rows cannot be {list(row_map)}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the session is closed; open a new one")

    def _check_input(self, hidden_BTH: Tensor, row_map: Sequence[int] | None) -> None:
        self._check_open()
        if hidden_BTH.dim() != 3 or hidden_BTH.shape[2] != self._facts.hidden_size:
            raise UsageError(
                f"hidden states have shape [rows, tokens, {self._facts.hidden_size}], "
                f"got {list(hidden_BTH.shape)}"
            )
        num_rows, num_tokens, _ = hidden_BTH.shape
        if num_rows == 0 or num_tokens == 0:
            raise UsageError("a step needs at least one row and one token")
        self.check_rows(num_rows, row_map)
        if not hidden_BTH.is_floating_point():
            raise UsageError(f"hidden states are floating point numbers, not {hidden_BTH.dtype}")
        if self._position + num_tokens > self._facts.max_tokens:
            raise UsageError(
                f"Maximum length exceeded: {self._position} tokens and {num_tokens} new ones are "
                f"more than the session's {self._facts.max_tokens}"
            )
        if not has_only_finite(hidden_BTH):
            raise UsageError("the hidden states contain NaN or infinity")

    async def _take(self, question: Question) -> list[Tensor]:
        """Take a step over all hops; from the first token on where nobody else kept those."""
        log = self._hops[0].log.copy()
        deadline: float | None = None
        while True:
            try:
                return await self._run(self._cut(question))
            except StartOverError as error:
                _logger.info("sending all tokens again from the first one")
                deadline = deadline or self._driver.make_deadline()
                if self._clock.now() > deadline:
                    raise UnavailableError("hops of the route were lost over and over") from error
                await self._driver.hang_up(*self._hops)
                place = Place(self._facts.span, log.copy(), (), position=question.position)
                self._hops = await self._driver.cover(place, self._num_rows, deadline, Refusals())

    async def _run(self, pieces: Sequence[Question]) -> list[Tensor]:
        """Take pieces over all hops, replacing those that are lost on the way.

        A hop that took one and is asked again, after an error of the step, rolls back first.
        """
        pipeline = Pipeline(self._driver, self._hops, pieces)
        mender = Mender(self._driver, pipeline, self._num_rows, self.failovers, self._standbys)
        try:
            while broken := await pipeline.run():
                for stretch, error in broken:
                    await mender.mend(stretch, error)
            return pipeline.outputs
        finally:
            self._hops = pipeline.hops
            self._driver.asking.end_step()
            self._mover.look(self._hops)
            if self._standbys is not None:
                self._standbys.look(self._hops)
