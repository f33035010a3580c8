"""The pieces of one step on their way over the hops: while one hop computes a piece, the one before
it computes the next.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from .blame import LostHopError, Refusals
from .live_hops import LiveHops, Question
from .route_opening import LiveHop

_LEAST_PIECE_TOKENS = 128
"""Rows times tokens below which a piece is not worth its frame."""

_COMPUTE_PER_ROUND_TRIP = 4.0
"""A hop rests for a round trip between two pieces: computing one should take this many times as
long."""


def choose_piece_tokens(
    num_hops: int, num_rows: int, rtt_seconds: float, tokens_per_second: float, most_tokens: int
) -> int:
    """Return how many tokens per row one piece of a prompt should have, at most `most_tokens`.

    Small pieces keep more hops busy at once, large ones lose less time between them. A power of
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


@dataclass
class Trouble:
    """What one place of a pipeline has seen since it last got a piece through."""

    refusals: Refusals = field(default_factory=Refusals)
    deadline: float | None = None
    pause_seconds: float = 0.0


@dataclass
class _Place:
    """One hop's place: the pieces that wait for it, and how many have yet to come by."""

    waiting: deque[Question]
    num_left: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: Trouble = field(default_factory=Trouble)


class Pipeline:
    """Takes pieces over the hops of a session, in order. `outputs` are those behind the last.

    Hops are lost on the way: `run` says which, its owner puts others there with `replace` and
    runs it again. What every other hop has done stays done.
    """

    def __init__(
        self, driver: LiveHops, hops: Sequence[LiveHop], pieces: Sequence[Question]
    ) -> None:
        self._driver = driver
        self._hops = list(hops)
        self._places = [_Place(deque(), len(pieces)) for _ in hops]
        self._places[0].waiting.extend(pieces)
        self._lost: dict[int, LostHopError] = {}
        self.outputs: list[Tensor] = []

    def trouble(self, index: int) -> Trouble:
        """Return what the place has seen since it last got a piece through."""
        return self._places[index].trouble

    def position(self, index: int) -> int:
        """Return where the next piece for a place begins."""
        return self._places[index].waiting[0].position

    def replace(self, index: int, replacements: Sequence[LiveHop]) -> None:
        """Put one or more hops into the place of one."""
        self._hops[index : index + 1] = replacements
        num_left = self._places[index].num_left
        self._places[index + 1 : index + 1] = [_Place(deque(), num_left) for _ in replacements[1:]]

    async def run(self) -> dict[int, LostHopError]:
        """Go on until every piece is through or hops are lost; return those by index."""
        self._lost = {}
        if max(place.num_left for place in self._places) <= 1:
            await self._take_one()
            return self._lost
        for place in self._places:
            place.ready.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self._places)):
                    tasks.create_task(self._work(index))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self._lost

    async def _take_one(self) -> None:
        """Take the only piece along, from where it is."""
        for index, place in enumerate(self._places):
            if place.waiting and not await self._advance(index):
                return

    async def _work(self, index: int) -> None:
        """Take pieces over one hop until all are through or some hop is lost.

        The others finish the piece that they are at: cut short, they would be lost as well.
        """
        place = self._places[index]
        while place.num_left and not self._lost:
            if place.waiting:
                await self._advance(index)
            else:
                place.ready.clear()
                await place.ready.wait()

    async def _advance(self, index: int) -> bool:
        """Take the next piece over one hop; return False when the hop is lost."""
        place, live = self._places[index], self._hops[index]
        is_last = index + 1 == len(self._places)
        piece = place.waiting[0]
        asked = replace(piece, last_token_only=piece.last_token_only and is_last)
        try:
            output_BTH = await self._driver.ask(live, asked)
        except LostHopError as error:
            self._lost[index] = error
            for other in self._places:
                other.ready.set()
            return False
        self._driver.accuse(place.trouble.refusals)
        place.trouble = Trouble()
        place.waiting.popleft()
        place.num_left -= 1
        num_tokens = piece.hidden_BTH.shape[1]
        live.log.append(
            piece.position, num_tokens, piece.hidden_BTH, piece.row_map, piece.is_decoded
        )
        if is_last:
            self.outputs.append(output_BTH)
        else:
            following = self._places[index + 1]
            following.waiting.append(replace(piece, hidden_BTH=output_BTH))
            following.ready.set()
        return True
