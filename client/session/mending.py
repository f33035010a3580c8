"""Puts other hops into the places of those that a step has lost, and stands between two that do not
reach each other.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.errors import UnavailableError
from ...protocol.spans import Span
from ..routing.peer_book import WAS_LOST
from ..routing.route import Hop
from ..trace.trace import Replacement
from .asking import BrokenSegmentError
from .live_hops import LiveHops, Place
from .pipeline import Pipeline, Stretch
from .route_opening import LiveHop
from .standby import Standbys
from .wiring import StartOverError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failover:
    """One unplanned change of hop, for whoever watches.

    `seconds` runs from the moment the loss was noticed until the replacement was ready.
    """

    lost: Hop
    reason: str
    replacements: tuple[Hop, ...]
    position: int
    num_replayed_tokens: int
    seconds: float
    what_happened: str = WAS_LOST
    """In a few words, behind the name of the lost peer; `reason` has all of them."""

    @property
    def changed_weights(self) -> str | None:
        """The format of other weights that computes from here on, None while it is the same.

        Only peers of the same format compute the same to the last bit.
        """
        before = self.lost.peer.weights
        others = (hop.peer.weights for hop in self.replacements)
        return next((weights for weights in others if weights != before), None)


class Mender:
    """Mends the pipeline of one step; notes every hop that was replaced among the failovers."""

    def __init__(
        self,
        driver: LiveHops,
        pipeline: Pipeline,
        num_rows: int,
        failovers: list[Failover],
        standbys: Standbys | None = None,
    ) -> None:
        self._driver = driver
        self._standbys = standbys
        self._pipeline = pipeline
        self._num_rows = num_rows
        self._failovers = failovers

    async def mend(self, stretch: Stretch, error: BrokenSegmentError) -> None:
        """Put other hops, with the same cache, into the place of lost ones."""
        trouble = stretch.trouble
        trouble.deadline = trouble.deadline or self._driver.make_deadline()
        while True:
            for lost in error.lost:
                trouble.refusals.note(lost)
            # At once the first time; peers that open and then fail must not be stormed.
            await asyncio.sleep(trouble.pause_seconds)
            trouble.pause_seconds = min(max(2 * trouble.pause_seconds, 0.05), 1.0)
            if self._driver.clock.now() > trouble.deadline:
                # Replacements were found and lost again, over and over.
                failure = error.lost[0] if error.lost else UnavailableError(str(error))
                raise failure.__cause__ or failure
            try:
                if error.cut is not None:
                    await self._bridge(stretch, error.cut)
                while (run := stretch.find_lost()) is not None:
                    await self._replace(stretch, run, error)
                return
            except BrokenSegmentError as more:
                error = more

    async def _bridge(self, stretch: Stretch, cut: int) -> None:
        """Stand between two hops that live and do not reach each other."""
        before, after = stretch.hops[cut : cut + 2]
        await self._driver.wiring.bridge(before, after, stretch)
        self._pipeline.replace(stretch, 0, 0, ())
        _logger.info("carrying tokens to blocks %s", after.hop.span)

    async def _replace(
        self, stretch: Stretch, run: tuple[int, int], error: BrokenSegmentError
    ) -> None:
        """Put hops into the place of some that stand side by side."""
        start, stop = run
        lost, started_at = stretch.hops[start:stop], self._driver.clock.now()
        trouble = stretch.trouble
        assert trouble.deadline is not None
        if start == 0 and not lost[0].is_log_whole:
            raise StartOverError
        place = Place(
            Span(lost[0].hop.span.start, lost[-1].hop.span.stop),
            lost[0].log,
            stretch.pending,
            stretch.position,
            stretch.hops[start - 1] if start else None,
            stretch.hops[stop] if stop < len(stretch.hops) else None,
            stretch.newest_sequence,
        )
        replacements = await self._find_standby(lost, place)
        num_tokens = 0
        if not replacements:
            self._driver.sought = place.span
            try:
                replacements = await self._driver.cover(
                    place,
                    self._num_rows,
                    trouble.deadline,
                    trouble.refusals,
                    lost[0].hop.peer.weights,
                )
            finally:
                self._driver.sought = None
            num_tokens = place.log.length if start == 0 else place.position
        self._pipeline.replace(stretch, start, stop, replacements)
        reasons = {reason.hop: reason for reason in error.lost}
        for live in lost:
            failover = Failover(
                live.hop,
                str(reasons.get(live.hop, error)),
                tuple(replacement.hop for replacement in replacements),
                place.position,
                num_tokens,
                self._driver.clock.now() - started_at,
                reasons[live.hop].what_happened if live.hop in reasons else WAS_LOST,
            )
            self._note(failover, started_at)

    async def _find_standby(self, lost: Sequence[LiveHop], place: Place) -> list[LiveHop]:
        """Return what can take the place of one lost hop at once, if anything."""
        if self._standbys is None or len(lost) != 1:
            return []
        standby = await self._standbys.take_over(lost[0], place)
        return [] if standby is None else [standby]

    def _note(self, failover: Failover, started_at: float) -> None:
        self._failovers.append(failover)
        if (recorder := self._driver.recorder) is not None:
            recorder.add(
                Replacement(
                    recorder.step,
                    started_at,
                    started_at + failover.seconds,
                    failover.lost,
                    failover.replacements,
                    failover.reason,
                    failover.position,
                    failover.num_replayed_tokens,
                )
            )
        _logger.info(
            "replaced blocks %s at token %d: %s",
            failover.lost.span,
            failover.position,
            failover.reason,
        )
