"""The pieces of one step on their way over the hops: while one hop computes a piece, the one before
it computes the next.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...protocol.net.retry import Backoff, Retry
from ...protocol.spans import Span
from ..routing.route import Failures, Fault
from .exchange import Exchange
from .hop_link import (
    BrokenSegmentError,
    LiveHop,
    MissingHops,
    Question,
    StartOverError,
    cut_segments,
)
from .state import SessionContext

_AGAIN = Backoff(0.05, 1.0, jitter_fraction=0.25)
"""Between replacements of one hop, of which the first is looked for at once: peers that open and
then fail must not be stormed."""

_LEAST_PIECE_TOKENS = 128
"""Rows times tokens below which a piece is not worth its frame."""

_COMPUTE_PER_ROUND_TRIP = 4.0
"""A hop rests for a round trip between two pieces: computing one should take this many times as
long."""


def choose_piece_tokens(
    num_hops: int, num_rows: int, rtt_seconds: float, tokens_per_second: float, most_tokens: int
) -> int:
    """Return how many tokens per row one piece of a prompt should have, at most `most_tokens`.

    Small pieces keep more hops busy at once, large ones lose less time between them: a round trip
    in a star, nothing (`rtt_seconds` 0) in a chain, where more pieces are behind each. A power of
    two, so that pieces end where the parts end in which a peer computes: with int8 weights its
    results do not depend on how a prompt was cut.

    >>> choose_piece_tokens(2, 1, 0.001, 1000.0, 2048)
    128
    >>> choose_piece_tokens(2, 1, 0.1, 1000.0, 2048)
    256
    """
    if num_hops > 1:
        wanted = _COMPUTE_PER_ROUND_TRIP * rtt_seconds * tokens_per_second
        most_tokens = min(most_tokens, int(max(wanted, _LEAST_PIECE_TOKENS)) // num_rows)
    return 2 ** (max(most_tokens, 1).bit_length() - 1)


@dataclass(eq=False)
class SegmentQueue:
    """A segment's part of a pipeline: the pieces that wait for it, how many of them were sent
    already (and the newest that ever was), and how many have yet to come by.
    """

    hops: list[LiveHop]
    waiting: deque[Question]
    num_left: int
    num_sent: int = 0
    newest_sent: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failures: Failures | None = None

    @property
    def pending(self) -> tuple[int, ...]:
        """The sequences of the pieces that wait."""
        return tuple(piece.sequence for piece in self.waiting)

    @property
    def newest_sequence(self) -> int:
        """The newest step that the hops can have been sent by those before, if nobody lies."""
        return max(self.newest_sent, self.waiting[0].sequence - 1)

    @property
    def position(self) -> int:
        """The position of the next piece."""
        return self.waiting[0].position

    @property
    def is_asked_for_last_token(self) -> bool:
        """Return whether a piece of several tokens was sent of which one is wanted in the end."""
        sent = itertools.islice(self.waiting, self.num_sent)
        return any(piece.last_token_only and piece.hidden_BTH.shape[1] > 1 for piece in sent)

    def note_failures(self, state: SessionContext) -> Failures:
        """Return what is noted of hops that are lost here; time for others runs from the first."""
        if self.failures is None:
            retry = Retry(_AGAIN, state.clock, state.make_deadline(), state.rng)
            self.failures = Failures(retry)
        return self.failures

    def find_missing(self, start: int, stop: int) -> MissingHops:
        """Describe what is missing without the hops of a half-open range."""
        before = self.hops[start - 1] if start else None
        after = self.hops[stop] if stop < len(self.hops) else None
        first, last = self.hops[start], self.hops[stop - 1]
        return MissingHops(
            Span(first.hop.span.start, last.hop.span.stop),
            first.log,
            self.pending,
            self.position,
            before,
            after,
            self.newest_sequence,
        )

    def find_lost(self) -> tuple[int, int] | None:
        """Return the last run of lost hops, as a half-open range of indices."""
        lost = [index for index, live in enumerate(self.hops) if live.link is None]
        if not lost:
            return None
        start = stop = lost[-1]
        while start - 1 in lost:
            start -= 1
        return start, stop + 1


class Pipeline:
    """Takes pieces over the segments of a route, in order. `outputs` are those behind the last.

    Hops are lost on the way: `run` says where, its owner puts others there with `replace` and
    runs it again. What every other hop has done stays done.
    """

    def __init__(
        self,
        state: SessionContext,
        exchange: Exchange,
        hops: Sequence[LiveHop],
        pieces: Sequence[Question],
    ) -> None:
        self._state = state
        self._exchange = exchange
        segments = cut_segments(hops)
        self._queues = [SegmentQueue(segment, deque(), len(pieces)) for segment in segments]
        self._queues[0].waiting.extend(pieces)
        self._broken: list[tuple[SegmentQueue, BrokenSegmentError]] = []
        self.outputs: list[Tensor] = []

    @property
    def hops(self) -> list[LiveHop]:
        """All hops, in order."""
        return [live for queue in self._queues for live in queue.hops]

    def replace(
        self, queue: SegmentQueue, start: int, stop: int, replacements: Sequence[LiveHop]
    ) -> None:
        """Put one or more hops into the place of some; they may push to other hops than before.

        Raises StartOverError when hops answer themselves now that were asked for less than what
        the others need.
        """
        if start == 0 and stop > 0:
            queue.num_sent = 0
        queue.hops[start:stop] = replacements
        segments = cut_segments(queue.hops)
        queue.hops = segments[0]
        was_last = queue is self._queues[-1]
        index = self._queues.index(queue) + 1
        self._queues[index:index] = [
            SegmentQueue(segment, deque(), queue.num_left, newest_sent=queue.newest_sent)
            for segment in segments[1:]
        ]
        if was_last and len(segments) > 1 and queue.is_asked_for_last_token:
            raise StartOverError

    async def run(self) -> list[tuple[SegmentQueue, BrokenSegmentError]]:
        """Go on until every piece is through or hops are lost; return where, and why."""
        self._broken = []
        if max(queue.num_left for queue in self._queues) <= 1:
            await self._take_one()
            return self._broken
        for queue in self._queues:
            queue.ready.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in self._queues:
                    tasks.create_task(self._work(queue))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self._broken

    async def _take_one(self) -> None:
        """Take the only piece along, from where it is."""
        for queue in self._queues:
            if queue.waiting and not await self._advance(queue):
                return

    async def _work(self, queue: SegmentQueue) -> None:
        """Take pieces over one segment until all are through or some hop is lost.

        The others finish the piece that they are at: cut short, they would be lost as well.
        """
        while queue.num_left and not self._broken:
            if queue.waiting:
                await self._advance(queue)
            else:
                queue.ready.clear()
                await queue.ready.wait()

    async def _advance(self, queue: SegmentQueue) -> bool:
        """Take the next piece over one segment; return False when hops of it are lost."""
        index = self._queues.index(queue)
        is_last = index + 1 == len(self._queues)
        piece = queue.waiting[0]
        try:
            output_BTH = await self._ask(queue, is_last)
        except BrokenSegmentError as error:
            self._broken.append((queue, error))
            for other in self._queues:
                other.ready.set()
            return False
        if queue.failures is not None:
            for hop in queue.failures.refusals.contradicted:
                self._state.book.quarantine(hop.peer, Fault.BROKEN)
            queue.failures = None
        queue.waiting.popleft()
        queue.num_left -= 1
        first, num_tokens = queue.hops[0], piece.hidden_BTH.shape[1]
        if first.is_log_whole:
            first.log.append(
                piece.position, num_tokens, piece.hidden_BTH, piece.row_map, piece.is_decoded
            )
        for tail in first.tails:
            tail.append(piece)
        if is_last:
            self.outputs.append(output_BTH)
            if self._state.progress is not None:
                self._state.progress.num_done += num_tokens
        else:
            following = self._queues[index + 1]
            following.waiting.append(replace(piece, hidden_BTH=output_BTH))
            following.ready.set()
        return True

    async def _ask(self, queue: SegmentQueue, is_last: bool) -> Tensor:
        """Return the output of the next piece; into a chain, send some more behind it."""
        waiting = queue.waiting
        num_ahead = 1 if len(waiting) == 1 else self._count_ahead(queue)
        while queue.num_sent < min(len(waiting), num_ahead):
            self._exchange.check_links(queue.hops)
            piece = waiting[queue.num_sent]
            queue.newest_sent = max(queue.newest_sent, piece.sequence)
            if piece.last_token_only and not is_last:
                piece = replace(piece, last_token_only=False)
            await self._exchange.send(queue.hops, piece)
            queue.num_sent += 1
        output_BTH = await self._exchange.receive(queue.hops, waiting[0])
        queue.num_sent -= 1
        return output_BTH

    def _count_ahead(self, queue: SegmentQueue) -> int:
        """Return how many pieces may be on their way through a segment.

        One where a hop is asked alone. In a chain one for each hop and one between them will do if
        hops are near. Far away, many more fit on the lines; together as much as one step may have,
        so that peers hold no more than that.
        """
        if not queue.hops[0].capability:
            return 1
        fitting = self._state.max_piece_tokens // queue.waiting[0].hidden_BTH.shape[1]
        return max(len(queue.hops) + 1, fitting)
