"""The adapter of a session, which each of its hops has to have before it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from ...protocol.ids import NO_ADAPTER, AdapterId
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter, cut_apart
from ..routing.route import Hop
from .pass_asking import PassAsker


@dataclass(frozen=True)
class SessionAdapter:
    """One adapter for all rows, as it was when the session was opened."""

    adapter: SentAdapter
    asker: PassAsker

    async def name_for(self, span: Span) -> AdapterId:
        """Return what a hop with these blocks knows it by."""
        await cut_apart([self.adapter], span)
        cut = self.adapter.cut(span)
        return NO_ADAPTER if cut is None else cut.name

    async def bring(self, hop: Hop) -> None:
        """Give it to a hop that may not have it; raises what `PassLink.bring` does."""
        await self.asker.bring_adapter(hop, self.adapter)

    def note_failure(self, hop: Hop, error: ShoalError) -> None:
        """Note that a hop has lost it, if that is what it said: it gets it again."""
        if isinstance(error, RefusedError) and error.code is ErrorCode.UNKNOWN_ADAPTER:
            self.asker.forget_adapters(hop)
