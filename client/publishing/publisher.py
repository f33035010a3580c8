"""Publishes adapters: peers keep them for as long as this client says so again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from ...protocol.errors import UsageError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.messages.adapters import KEEP_SECONDS
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterVersion, cut_apart
from ..concurrency.tasks import Background, KeyedSemaphores, cancel_all, run_all
from ..passes.pass_asking import PassAsker
from .arrivals import Arrivals
from .keeper_calls import KeeperCalls, knows_publications
from .keeper_tasks import RENEWAL_SECONDS, KeeperTasks
from .keepers import Keepers
from .publication import Claim, Publication

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""How often somebody looks for peers that have come: whoever uses an adapter may need them."""

_LOOKS_PER_RENEWAL = round(RENEWAL_SECONDS / _LOOK_SECONDS)

_WITHDRAWING_SECONDS = 15.0
"""After so long no more peers begin to hear of withdrawals: who closes a model waits for those."""

_MAX_FORMER = 1000
"""Of so many that no peer has any more it is known that they were published here."""


class Publisher:
    """What a client has published and not withdrawn. Owned by the client's loop; close it.

    It decides what peers are to keep and to forget. Each of them is told by itself.
    """

    def __init__(self, asker: PassAsker, clock: Clock) -> None:
        self._asker = asker
        self._clock = clock
        self._calls = KeeperCalls(asker, clock)
        self._background = Background()
        self._tasks = KeeperTasks(self._calls, clock, self._background, self._is_spreading)
        self._published: dict[AdapterId, Publication] = {}  # the newest one is the last
        self._former: dict[AdapterId, Publication] = {}  # wanted by nobody, and nobody has it
        self._numbers = itertools.count()
        self._begun: set[Claim] = set()  # of the calls that have not ended
        self._newest: dict[tuple[str, Span], int] = {}  # of the claims that peers have met
        self._withdrawing = KeyedSemaphores[AdapterId]()
        self._arrivals = Arrivals()
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"<Publisher, {len(self._published)} published, {len(self._former)} former, "
            f"{len(self._newest)} kinds>"
        )

    async def publish(self, adapter: AdapterVersion, span: Span, lineage: str) -> None:
        """Give an adapter to all who serve blocks, until it is withdrawn.

        Returns when there are peers that keep it for all blocks; the others go on getting it. One
        of the same lineage and span from before is not renewed any more. Warns of blocks for which
        no peer keeps it yet. Raises what the last peer did if nobody keeps it: the one from before
        stays then; UsageError if it is withdrawn meanwhile.
        """
        claim = Claim(lineage, span, next(self._numbers))
        self._begun.add(claim)
        try:
            await self._publish(adapter, claim)
        finally:
            self._begun.discard(claim)
            self._rest()
            self._forget()

    async def withdraw(self, name: AdapterId) -> int:
        """Have all peers forget an adapter; return how many could not be told.

        They forget it by themselves, and are told again if this is called again: 0 where nobody is
        left to be told. Raises UsageError for another's, and for one that is not remembered.
        """
        peers = await self._asker.list_peers()
        async with self._withdrawing.hold(name):
            self._forget()
            publication = self._published.get(name) or self._former.get(name)
            if publication is None:
                raise UsageError(
                    f"{name.hex():.12}… was not published here: only the client that published an "
                    "adapter can withdraw it"
                )
            self._published.setdefault(name, publication)
            if not publication.is_wanted and not publication.is_withdrawn:
                # It was replaced. Wherever this client has used it since, it was kept by that.
                for peer in filter(knows_publications, peers):
                    publication.note_sent(peer.peer_id, self._clock.now())
            return await self._withdraw([publication])

    async def close(self) -> None:
        """Withdraw everything."""
        self._is_closed = True
        await self._background.close()
        async with AsyncExitStack() as lanes:
            for name in list(self._published):
                await lanes.enter_async_context(self._withdrawing.hold(name))
            await self._withdraw(list(self._published.values()))

    async def _publish(self, adapter: AdapterVersion, claim: Claim) -> None:
        await cut_apart([adapter], claim.span)
        peers = self._tasks.sort(await self._asker.list_peers())
        if not self._is_anything_claimed:
            self._arrivals.list_new(peers)  # they are brought the first one now
        publication = await self._claim(adapter, claim)
        try:
            await self._wait_for_keepers(publication, peers, claim.span)
            self._replace_before(claim)
        except BaseException:
            publication.claims.discard(claim)
            raise
        finally:
            publication.num_waiting -= 1

    async def _claim(self, adapter: AdapterVersion, claim: Claim) -> Publication:
        """Return the publication that is to be kept from now on, for somebody who waits for it.

        While peers are told to forget it, none is brought it again.
        """
        cut = adapter.cut(claim.span)
        assert cut is not None
        async with self._withdrawing.hold(cut.name):
            if self._is_closed:
                raise UsageError("the model is closed; nothing can be published any more")
            self._former.pop(cut.name, None)
            publication = self._published.pop(cut.name, None) or Publication(cut.name, claim.span)
            self._published[cut.name] = publication
            publication.version, publication.is_withdrawn = adapter, False
            publication.span = claim.span
            publication.claims.add(claim)
            publication.num_waiting += 1
        for other in self._published.values():
            if other.claims and not self._is_spreading(other):
                self._tasks.cancel(other)
        if self._renewing is None or self._renewing.done():
            self._renewing = self._background.start(self._renew())
        return publication

    @property
    def _is_anything_claimed(self) -> bool:
        return any(publication.claims for publication in self._published.values())

    def _is_spreading(self, publication: Publication) -> bool:
        """Return whether more peers are to have it: not while a later state is on its way."""
        return publication.num_waiting > 0 or any(
            all(claim.kind != one.kind or claim.number >= one.number for one in self._begun)
            for claim in publication.claims
        )

    async def _wait_for_keepers(
        self, publication: Publication, peers: Sequence[Announcement], span: Span
    ) -> None:
        """Wait until peers keep a publication for all blocks of a span, and some more do.

        Blocks that nobody serves are not waited for, nor those that only refuse it.
        """
        peer_of = {self._tasks.begin(publication, peer): peer for peer in peers}
        rest = set(peer_of)
        keepers = Keepers(span, publication.num_bytes, self._clock.now())
        while rest and (seconds := keepers.deadline - self._clock.now()) > 0:
            done, rest = await asyncio.wait(
                rest, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if not task.cancelled():
                    keepers.note(peer_of[task], task.result())
            keepers.wait_for([peer_of[task] for task in rest], self._clock.now())
        if publication.is_withdrawn or self._is_closed:
            raise UsageError("the adapter was withdrawn while it was published")
        if not peers:
            raise self._asker.make_route_error(span)
        keepers.check([peer_of[task] for task in rest], self._clock.now())

    def _replace_before(self, claim: Claim) -> None:
        """Let what peers keep now take the place of what is older, and give way to what is newer.

        Calls need not end in the order in which they have begun.
        """
        kind = claim.kind
        newest = self._newest[kind] = max(claim.number, self._newest.get(kind, claim.number))
        for publication in self._published.values():
            publication.claims -= {
                one for one in publication.claims if one.kind == kind and one.number < newest
            }

    def _rest(self) -> None:
        """Bring to nobody what nobody wants any more, and keep no copy of it."""
        for publication in self._published.values():
            if not publication.is_wanted:
                publication.version = None
                self._tasks.cancel(publication)

    async def _renew(self) -> None:
        """Begin again and again as long as something is to be kept, and wait for nobody."""
        for number in itertools.count(1):
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._is_anything_claimed:
                return
            self._background.start(self._begin_renewals(number % _LOOKS_PER_RENEWAL == 0))

    async def _begin_renewals(self, is_due: bool) -> None:
        """Begin at whoever has come since the last time; where renewals are due, at all peers."""
        self._forget()
        peers = await self._asker.list_peers()
        new = self._arrivals.list_new(peers)
        for peer in new:
            self._tasks.note_arrival(peer)
        wanted = [publication for publication in self._published.values() if publication.claims]
        self._tasks.renew(wanted, peers if is_due else new)
        self._tasks.deliver_owed(peers)

    async def _withdraw(self, publications: Sequence[Publication]) -> int:
        """Stop bringing publications, and tell all who may have them; return who could not be told.

        Each peer hears of the newest first. Who has left does not count.
        """
        for publication in publications:
            publication.claims.clear()
            publication.is_withdrawn = True
        carrying_seconds = self._calls.expect_carrying_seconds()  # with what is cancelled now
        await cancel_all(task for one in publications for task in one.tasks.values())
        self._rest()
        withdrawn: dict[PeerId, list[Publication]] = {}
        for publication in reversed(publications):
            for peer_id in publication.holders:
                withdrawn.setdefault(peer_id, []).append(publication)
        told: list[bool] = []
        hearing: list[tuple[Announcement, list[Publication]]] = []
        for peer_id, theirs in withdrawn.items():
            peer = self._asker.find_peer(peer_id)
            if peer is not None and knows_publications(peer):
                hearing.append((peer, theirs))
            elif peer is not None:
                told.append(False)
                for publication in theirs:
                    publication.note_gone(peer_id)  # it will never hear of that
        hearing.sort(key=lambda one: not self._tasks.has_kept(one[0]))
        until = self._clock.now() + _WITHDRAWING_SECONDS
        told += await run_all(
            self._calls.withdraw(theirs, peer, carrying_seconds, until) for peer, theirs in hearing
        )
        self._forget()
        num_untold = told.count(False)
        if num_untold:
            _logger.warning(
                "not all peers could be told that an adapter is withdrawn (%d could not): they "
                "forget it within %.0f minutes",
                num_untold,
                KEEP_SECONDS / 60,
            )
        return num_untold

    def _forget(self) -> None:
        """Forget who has forgotten what; know little more than names of what nobody has any more.

        Those may still be withdrawn: again, or for the first time after they were replaced.
        """
        for name, publication in list(self._published.items()):
            publication.forget_expired(self._clock.now())
            if publication.is_over:
                self._former.pop(name, None)
                self._former[name] = self._published.pop(name)
        while len(self._former) > _MAX_FORMER:
            del self._former[next(iter(self._former))]
        claims = self._begun.union(*(one.claims for one in self._published.values()))
        kinds = {claim.kind for claim in claims}
        self._newest = {kind: self._newest[kind] for kind in kinds & self._newest.keys()}
