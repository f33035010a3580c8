"""The failures of one pass so far, and its deadline."""

from __future__ import annotations

import asyncio

from ...protocol.errors import RefusedError, RouteError
from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Backoff, Retry
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ...protocol.versions import PASS_VERSION
from ..routing.route import LostHopError, PeerFailure, Trouble

_AGAIN = Backoff(0.1, 1.6)


class PassTrouble(Trouble):
    """The failures of one pass so far; its deadline starts with the first one."""

    def __init__(self, span: Span, clock: Clock, timeout_seconds: float) -> None:
        super().__init__(Retry(_AGAIN, clock))
        self.too_small: set[PeerId] = set()
        """Peers that have no memory for it."""
        self.brought_again: set[PeerId] = set()
        """Peers that had lost an adapter, and got it once more."""
        self.least_version = PASS_VERSION
        """The least protocol version; peers of older versions are not asked."""
        self._lost: list[LostHopError] = []
        self._full_until: dict[PeerId, float] = {}
        self._span = span
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._error: PeerFailure | None = None

    @property
    def full(self) -> set[PeerId]:
        """Peers that have no room for an adapter at present."""
        now = self._clock.now()
        return {peer_id for peer_id, until in self._full_until.items() if now < until}

    @property
    def is_known(self) -> bool:
        """Whether anything went wrong."""
        return self._error is not None

    def note(self, error: PeerFailure) -> None:
        """Note a failure."""
        if self.is_known:
            self.retry.note_failure()  # the second try comes at once
        else:
            self.retry.deadline = self._clock.now() + self._timeout_seconds
        self._error = error

    def note_lost(self, lost: LostHopError) -> None:
        """Note a peer that has failed, for which it was blamed."""
        self.refusals.note(lost)
        self._lost.append(lost)

    def take_lost(self, span: Span) -> list[LostHopError]:
        """Return who has failed at some of these blocks since this was called last."""
        lost = [
            one
            for one in self._lost
            if one.hop.span.start < span.stop and span.start < one.hop.span.stop
        ]
        self._lost = [one for one in self._lost if one not in lost]
        return lost

    def note_full(self, peer_id: PeerId, seconds: float) -> None:
        """Note that a peer has no room for an adapter, and said when to ask again."""
        self._full_until[peer_id] = self._clock.now() + seconds

    async def wait_for_room(self) -> None:
        """Wait until one of those that were full may be asked again, or the time is up."""
        until = min(self.retry.deadline, *(self._full_until[peer_id] for peer_id in self.full))
        await asyncio.sleep(max(0.0, until - self._clock.now()))

    def raise_refusal(self) -> None:
        """Raise what a peer said against the texts, if one did: nobody else is left to ask."""
        if self.refusals.first is not None:
            raise self.refusals.first
        if self.too_small and self._error is not None:
            raise self._error

    async def pause(self) -> None:
        """Wait before the next try, longer each time; not at all before the first two.

        Raises what to say when the time is up: the newest refusal, or RouteError.
        """
        if self._error is not None and self.retry.remaining_seconds <= 0:
            if isinstance(self._error, RefusedError | RouteError):
                raise self._error
            detail = f"no peer accepts passes for blocks {self._span}: {self._error}"
            raise RouteError(detail, [self._span]) from self._error
        await self.retry.pause()


def make_route_error(span: Span, view: SwarmView, weights: str | None) -> RouteError:
    """Return what to say where nobody takes passes through some blocks of a span."""
    missing = [gap for gap in view.gaps if gap.start < span.stop and span.start < gap.stop]
    missing = missing or [Span(span.start, span.start + 1)]
    names = ", ".join(map(str, missing))
    suffix = "" if weights is None else f" with {weights} weights"
    return RouteError(f"no reachable peer serves blocks {names} for fine-tuning{suffix}", missing)
