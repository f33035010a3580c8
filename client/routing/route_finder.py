"""Finds routes over the peers of one model's swarm, and waits for those that are missing."""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from ...protocol.errors import DirectoryError, RouteError
from ...protocol.ids import ModelId, PeerId
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.net.gossip import GossipDirectory
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.transport import Transport
from ...protocol.spans import Span
from ..settings.client_config import ClientConfig
from .own_coordinate import OwnCoordinate
from .peer_book import NO_DOUBT, PeerBook, make_filter
from .route import Ends, Fault, Hop, Route
from .router import RoutingCosts, expect_way_seconds, plan_route

_LOOK_AGAIN = Backoff(0.1, 1.0)
"""Between two looks into the directory for peers that are missing."""

GOSSIP_BYTES = 5 * 2**10
"""An idle client asks one peer every ten seconds for so many bytes of announcements: with the TLS
handshake less than 1 KB/s, and within half a minute about forty peers."""

_MOST_ASKED = 24
"""Peers that are asked at once for blocks that nobody serves, after fewer did not know of any."""

_LEAST_GOSSIP_SECONDS = 1.0

_SHORT_SECONDS = 0.5
"""Seconds that the directory gets to answer even after the deadline."""


@dataclass(frozen=True)
class SwarmModel:
    """The model whose swarm is joined."""

    model_id: ModelId
    num_blocks: int
    hidden_size: int


class RouteFinder:
    """Finds routes over the peers that are announced, by what its `book` says of them.

    Owned by the client's event loop.
    """

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        model: SwarmModel,
        clock: Clock,
        config: ClientConfig,
    ) -> None:
        self._rng = random.Random(config.seed)
        self._clock = clock
        self._transport = transport
        self._gossip_seconds = max(config.refresh_seconds, _LEAST_GOSSIP_SECONDS)
        may_use = make_filter(config.allowed_servers, config.blocked_servers)
        model_id = model.model_id
        self._directory = GossipDirectory(
            directory, model_id, transport, clock, random.Random(config.seed), may_use
        )
        self._directory.most_at_once = _MOST_ASKED
        self.book = PeerBook(
            partial(self._directory.lookup, model_id),
            partial(directory.records.list_current, model_id),
            may_use,
            model_id,
            model.num_blocks,
            clock,
        )
        self._may_use = may_use if config.allowed_servers is not None else None
        self._records = directory.records
        self._coordinate = OwnCoordinate(self.book, clock, self._rng)

    def __repr__(self) -> str:
        return f"<RouteFinder {self.book!r}>"

    async def wait_for_route(
        self,
        span: Span,
        deadline: float,
        max_age_seconds: float,
        weights: Collection[str | None],
        exclude: Collection[PeerId] = (),
        needed_kv_tokens: float = 0.0,
        ends: Ends | None = None,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> Route:
        """Return a route through `span`, waiting for peers to appear until `deadline`.

        `weights` are tried in order: the formats to prefer, None for any. Peers of `exclude` and
        those in quarantine are left out; the latter are used when nobody else is there, unless they
        lied or their announcement is stale. While the directory cannot be read, the last view has
        to do. Room for `needed_kv_tokens`, counted as in announcements, makes peers cheaper. With
        `ends` it is a chain, else a star.

        Raises RouteError with the missing blocks once the deadline has passed or `may_wait` returns
        False, and at once if `allowed_servers` is why nobody serves them; or DirectoryError when
        that is what hides the peers.
        """
        retry = Retry(_LOOK_AGAIN, self._clock, deadline)
        while True:
            unread: DirectoryError | None = None
            try:
                async with asyncio.timeout(max(retry.remaining_seconds, _SHORT_SECONDS)):
                    await self.book.refresh(max_age_seconds)
            except DirectoryError as error:
                unread = error
            except TimeoutError:
                unread = DirectoryError("the directory did not answer in time")
            try:
                return self._plan(span, weights, exclude, needed_kv_tokens, ends)
            except RouteError as missing:
                self._check_allowed(missing)
                if retry.remaining_seconds <= 0 or not may_wait():
                    raise (unread or missing) from None
            retry.note_failure()
            await retry.pause()
            max_age_seconds = 0.0

    def find_gaps(self, span: Span, weights: Collection[str | None]) -> RouteError | None:
        """Return what to say of all the blocks of a span that nobody serves, by the last view."""
        try:
            self._plan(span, weights, (), 0.0, None)
        except RouteError as error:
            return error
        return None

    def _plan(
        self,
        span: Span,
        weights: Collection[str | None],
        exclude: Collection[PeerId],
        needed_kv_tokens: float,
        ends: Ends | None,
    ) -> Route:
        costs = self._make_costs(needed_kv_tokens)
        doubts = self.book.list_doubts()
        error: RouteError | None = None
        for tolerated in sorted({NO_DOUBT, *doubts.values()} - {Fault.STALE, Fault.LYING}):
            unwanted = {peer_id for peer_id, doubt in doubts.items() if doubt > tolerated}
            for kind in weights:
                try:
                    avoided = unwanted.union(exclude)
                    return plan_route(self.book.view, span, costs, self._rng, avoided, kind, ends)
                except RouteError as missing:
                    error = missing
        assert error is not None
        raise error

    def _check_allowed(self, error: RouteError) -> None:
        """Raise RouteError if missing blocks are served, by nobody who is or was allowed."""
        if self._may_use is None:
            return
        model_id, now = self.book.view.model_id, self._clock.wall()
        current = self._records.list_current(model_id, now)
        known = [*current, *self._records.list_hints(model_id, now)]
        for span in cast("Sequence[Span]", error.missing):
            others = [peer for peer in current if peer.span.overlap(span) is not None]
            if others and not any(self._may_use(one) for one in known if one.span.overlap(span)):
                ids = ", ".join(peer.peer_id for peer in others[:3])
                raise RouteError(
                    f"allowed_servers leaves nobody for blocks {span}; they are served by {ids}"
                    + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
                    error.missing,
                ) from None

    def _make_costs(self, needed_kv_tokens: float = 0.0) -> RoutingCosts:
        return RoutingCosts(
            self.book.rtts_seconds,
            block_seconds=self.book.list_block_seconds(),
            needed_kv_tokens=needed_kv_tokens,
            broken_links=self.book.links.broken,
            coordinate=self._coordinate.find(),
        )

    async def keep_acquainted(self) -> None:
        """Learn of peers until cancelled: those that were joined through may be gone one day."""
        await self._directory.run(self._gossip_seconds, GOSSIP_BYTES)

    async def close(self) -> None:
        """Close the directory."""
        await self._directory.close()

    async def survey(self) -> None:
        """Find out where the client stands, if that is not known yet."""
        await self._coordinate.survey(self._transport)

    def expect_way_seconds(self, hops: Sequence[Hop]) -> list[float]:
        """Return the ways of a chain: to the first hop, from each to the next, and back."""
        known, key = self.book.way_seconds, tuple(hop.peer.peer_id for hop in hops)
        if key not in known:
            peers = [self.book.view.find(hop.peer.peer_id) or hop.peer for hop in hops]
            known[key] = expect_way_seconds(peers, self._make_costs())
        return known[key]
