"""Publishes adapters: pushes each to a few peers, which hold it for as long as this is renewed.

All other peers fetch it from those. So a client that nobody can dial publishes like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...protocol.errors import (
    RefusedError,
    RemoteProtocolError,
    SilentError,
    StaleAnnouncementError,
    UnavailableError,
    UsageError,
)
from ...protocol.ids import AdapterId, PeerId, SessionId, UploadId
from ...protocol.messages.adapters import (
    KEEP_SECONDS,
    STALL_SECONDS,
    AdapterWithdrawal,
    PublicationFetch,
    allow_upload_seconds,
)
from ...protocol.net.clock import SuspendAwareTimeout
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.net.tasks import cancel_all
from ...protocol.records.announcements import MAX_ADAPTERS, Announcement, shorten_adapter
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterLeaves
from ..concurrency.tasks import Background, KeyedSemaphores, run_all
from ..passes.microbatches import make_pass_id
from ..passes.pass_asking import PassAsker
from ..routing.route import Hop
from .publication import Claim, HolderUpload, Holding, Publication, can_hold

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""How often to look for holders that are gone, and for peers that can replace them."""

_RENEWAL_SECONDS = KEEP_SECONDS / 3
"""Two renewals may fail."""

_RENEWED_SECONDS = KEEP_SECONDS - _RENEWAL_SECONDS / 2
"""A peer that keeps an adapter for less than this has not renewed it: it knows a client by its
address too, and keeps what came from a former address until that expires."""

_PUBLISHING_SECONDS = 600.0
"""How long `publish` waits for holders of all blocks."""

_OTHERS_SECONDS = 5.0
"""How long it waits for second holders when each block has one."""

_UPLOADS_AT_ONCE = 2
"""More starve each other on a slow line: of eight that shared 1 Mbit/s, six were given up."""

_TURN_SECONDS = 30.0
_TURN_BYTES_PER_SECOND = 128 * 2**10
"""An upload that takes longer than this together holds up nobody: the peer may be slow, and not the
line. From then on it does not count as a holder to come either."""

_UNDER_WAY_BYTES = 3 * 2**19
"""So much of an upload is under way at most, as was seen in the buffers of a connection that shares
a slow line: what the peer has taken, or does not take, delays nobody else."""

WITHDRAWAL_SECONDS = 3.0
"""How long a peer may take to hear of withdrawals, beside what else is under way: a peer that does
not hear of them forgets the adapters by itself, and closing a model waits for this."""

_MOST_CARRYING_SECONDS = 30.0
"""How much longer it may take behind what else is under way."""

_MAX_REMEMBERED = 1000
"""Publications that nobody wants any more of which it is known that they were published here."""

_FAILING = Backoff(20.0, 3600.0)
"""How long a peer that failed or declined is not asked again."""


class Publisher:
    """The publications of a client. Owned by the client's loop; close it."""

    def __init__(self, asker: PassAsker) -> None:
        self._asker = asker
        self._clock = clock = asker.clock
        self._background = Background()
        self._publications: dict[AdapterId, Publication] = {}  # the newest one is the last
        self._numbers = itertools.count()
        self._peers: dict[PeerId, Announcement] = {}
        self._failing = Backoffs[PeerId](_FAILING, clock)
        self._turns = asyncio.Semaphore(_UPLOADS_AT_ONCE)
        self._withdrawing = KeyedSemaphores[AdapterId]()
        self._running: asyncio.Task[None] | None = None
        self._has_only_old_peers = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Publisher, {len(self._publications)} publications>"

    async def publish(self, leaves: AdapterLeaves, span: Span, lineage: str) -> None:
        """Have peers hold an adapter for some blocks, until it is withdrawn.

        Returns when each block has a holder. A state of the same lineage and span from before is
        not renewed any more. Warns of blocks that have no holder yet. Raises what the last peer did
        if there is no holder at all: the state from before stays then; UsageError if the adapter is
        withdrawn meanwhile.
        """
        claim = Claim(lineage, span, next(self._numbers))
        publication = await self._claim(leaves, claim)
        try:
            await self._wait_for_holders(publication)
            if claim not in publication.claims:
                others = self._publications.values()
                if any(one.replaces(claim) for other in others for one in other.claims):
                    return  # a later state has taken its place meanwhile
                raise UsageError("the adapter was withdrawn while it was published")
            self._check_holders(publication, span)
        except BaseException:
            publication.claims.discard(claim)
            raise
        else:
            for other in self._publications.values():
                other.claims -= {one for one in other.claims if claim.replaces(one)}
        finally:
            self._drop_unwanted()

    async def withdraw(self, name: AdapterId) -> int:
        """Have holders forget an adapter; return how many could not be told.

        They forget it by themselves, and are told again if this is called again: 0 where nobody is
        left to be told. Raises UsageError for another's, and for one that is not remembered.
        """
        async with self._withdrawing.hold(name):
            publication = self._publications.get(name)
            if publication is None:
                raise UsageError(
                    f"{name.hex():.12}… was not published here: only the client that published an "
                    "adapter can withdraw it"
                )
            return await self._withdraw([publication])

    async def close(self) -> None:
        """Withdraw everything."""
        self._is_closed = True
        await self._background.cancel()
        async with AsyncExitStack() as locks:
            for name in list(self._publications):
                await locks.enter_async_context(self._withdrawing.hold(name))
            await self._withdraw(list(self._publications.values()))

    async def _claim(self, leaves: AdapterLeaves, claim: Claim) -> Publication:
        """Return the publication that is to be held from now on.

        While holders are told to forget it, none is sent it again.
        """
        name = leaves.manifest.name
        async with self._withdrawing.hold(name):
            if self._is_closed:
                raise UsageError("the model is closed; nothing can be published any more")
            publication = self._publications.pop(name, None) or Publication(name)
            self._publications[name] = publication
            publication.want(leaves, claim)
        if self._running is None or self._running.done():
            self._running = self._background.start(self._run())
        return publication

    async def _wait_for_holders(self, publication: Publication) -> None:
        """Push until each block has a holder, and a little longer for the others.

        Also asks peers that have just failed, once.
        """
        await self._look()
        deadline, resting = self._clock.now() + _PUBLISHING_SECONDS, frozenset[PeerId]()
        while tasks := self._begin_uploads(publication, resting):
            if not publication.list_missing():
                deadline = min(deadline, self._clock.now() + _OTHERS_SECONDS)
            seconds = min(_LOOK_SECONDS, deadline - self._clock.now())
            if seconds <= 0:
                break
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            resting = self._failing.resting

    def _check_holders(self, publication: Publication, span: Span) -> None:
        """Warn of blocks without a holder; raise why there is none where none has one."""
        missing = publication.missing = publication.list_missing()
        if not missing:
            return
        if any(holding.is_sure for holding in publication.holders.values()):
            _logger.warning(
                "no peer holds the adapter for blocks %s yet, and it cannot be used until one "
                "does: %s",
                ", ".join(map(str, missing)),
                publication.error_text,
            )
        elif publication.error is not None:
            raise publication.error
        elif publication.uploads:
            raise SilentError(f"no peer has all of the adapter after {_PUBLISHING_SECONDS:.0f} s")
        elif self._has_only_old_peers:
            raise UnavailableError(
                "all peers of this swarm speak an older protocol version, which cannot publish "
                "adapters of this one: update them"
            )
        else:
            raise self._asker.make_route_error(span)

    def _drop_unwanted(self) -> None:
        """Send nobody what nobody wants any more, and keep little more than its name."""
        unwanted = [one for one in self._publications.values() if not one.claims]
        for publication in unwanted:
            publication.leaves = None
            for task in _list_tasks(publication):
                task.cancel()
        for publication in unwanted[: max(0, len(unwanted) - _MAX_REMEMBERED)]:
            del self._publications[publication.name]

    async def _run(self) -> None:
        """Keep up what is claimed; no peer waits for another one."""
        while any(publication.claims for publication in self._publications.values()):
            await asyncio.sleep(_LOOK_SECONDS)
            await self._look()
            for publication in self._publications.values():
                if publication.claims:
                    _tell_changed_holders(publication, has_peers=bool(self._peers))
                    self._begin_renewing(publication)
                    self._begin_uploads(publication, self._failing.resting)

    async def _look(self) -> None:
        """See which peers there are that can hold publications, least in doubt first."""
        peers = await self._asker.list_peers()
        self._peers = {peer.peer_id: peer for peer in peers if can_hold(peer)}
        self._has_only_old_peers = bool(peers) and not self._peers
        self._failing.forget_expired()
        for publication in self._publications.values():
            for peer_id, holding in list(publication.holders.items()):
                peer = self._peers.get(peer_id)
                if peer is None or peer.span != holding.span or self._clock.now() > holding.until:
                    publication.note(peer_id, replace(holding, is_sure=False))

    def _begin_renewing(self, publication: Publication) -> None:
        if publication.renewing is None or publication.renewing.done():
            publication.renewing = self._background.start(self._renew(publication))

    def _begin_uploads(
        self, publication: Publication, resting: Collection[PeerId]
    ) -> list[asyncio.Task[None]]:
        """Push to peers, but resting ones, so that each block gets enough holders.

        Returns what is under way then.
        """
        candidates = [peer for peer in self._peers.values() if peer.peer_id not in resting]
        for peer in publication.choose_holders(candidates, self._clock.now()):
            task = self._background.start(self._push(publication, peer))
            publication.uploads[peer.peer_id] = HolderUpload(peer.span, task)
            task.add_done_callback(partial(publication.forget_upload, peer.peer_id))
        return [upload.task for upload in publication.uploads.values()]

    async def _push(self, publication: Publication, peer: Announcement) -> None:
        """Give a peer what belongs to its blocks; never raises what the peer does."""
        leaves, peer_id, now = publication.leaves, peer.peer_id, self._clock.now
        assert leaves is not None
        upload_id = UploadId(SessionId(secrets.token_bytes(16)))
        head, data = leaves.cut(upload_id, peer.span)
        may_hold = Holding(peer.span, now(), now() + KEEP_SECONDS, is_sure=False)
        try:
            async with (
                self._take_turn(len(data)) as until,
                self._asker.lend(Hop(peer, peer.span), takes_turn=False) as link,
            ):
                publication.uploads[peer_id].until = until
                publication.note(peer_id, may_hold)
                with self._asker.line.carry(min(len(data), _UNDER_WAY_BYTES)):
                    patience_seconds = allow_upload_seconds(len(data))
                    seconds = await link.bring(head, data, STALL_SECONDS, patience_seconds)
            until = now() + min(seconds, KEEP_SECONDS)
            publication.note(peer_id, Holding(peer.span, now(), until))
            self._failing.note_success(peer_id)
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError):
                publication.note(peer_id, None)
            self._note_failure(publication, peer, error)

    @asynccontextmanager
    async def _take_turn(self, num_bytes: int) -> AsyncGenerator[float]:
        """Wait until few others upload; gives until when this is its turn, and then the next's."""
        await self._turns.acquire()
        seconds = _TURN_SECONDS + num_bytes / _TURN_BYTES_PER_SECOND
        with ExitStack() as turn:
            turn.callback(self._turns.release)
            timer = asyncio.get_running_loop().call_later(seconds, turn.close)
            turn.callback(timer.cancel)
            yield self._clock.now() + seconds

    async def _renew(self, publication: Publication) -> None:
        """Tell holders to keep what they have, where that is due, and see that they have it."""
        due = [
            self._renew_at(publication, peer, holding)
            for peer_id, holding in publication.holders.items()
            if (peer := self._peers.get(peer_id)) is not None
            if self._is_due(publication, peer, holding)
        ]
        await run_all(due)

    def _is_due(self, publication: Publication, peer: Announcement, holding: Holding) -> bool:
        if peer.peer_id in publication.uploads or not self._failing.may_try(peer.peer_id):
            return False
        names = peer.adapters
        # A peer that was restarted does not announce it any more.
        is_announced = len(names) == MAX_ADAPTERS or shorten_adapter(publication.name) in names
        is_old = self._clock.now() >= holding.renewed_at + _RENEWAL_SECONDS
        return not holding.is_sure or not is_announced or is_old

    async def _renew_at(
        self, publication: Publication, peer: Announcement, holding: Holding
    ) -> None:
        asked = PublicationFetch(make_pass_id(), publication.name)
        try:
            async with self._asker.lend(Hop(peer, peer.span), takes_turn=False) as link:
                seconds = await link.ask_kept(asked, self._expect_carrying_seconds())
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError):
                publication.note(peer.peer_id, None)
                return
            publication.note(peer.peer_id, replace(holding, is_sure=False))
            self._note_failure(publication, peer, error)
            return
        if seconds < _RENEWED_SECONDS:
            publication.note(peer.peer_id, None)  # it is pushed again, here or to another peer
            return
        now = self._clock.now()
        publication.note(peer.peer_id, Holding(peer.span, now, now + min(seconds, KEEP_SECONDS)))

    def _note_failure(
        self,
        publication: Publication,
        peer: Announcement,
        error: UnavailableError | RemoteProtocolError | RefusedError,
    ) -> None:
        _logger.info("peer …%s does not hold an adapter: %s", peer.peer_id[-6:], error)
        publication.note_error(peer, error)
        if self._failing.may_try(peer.peer_id):  # what fails at once fails for one reason
            self._failing.note_failure(peer.peer_id)

    async def _withdraw(self, publications: Sequence[Publication]) -> int:
        """Renew publications no more, and tell their holders; return how many were not told."""
        carrying_seconds = self._expect_carrying_seconds()  # with what is cancelled now
        for publication in publications:
            publication.claims.clear()
        await cancel_all(task for one in publications for task in _list_tasks(one))
        self._drop_unwanted()
        held: dict[PeerId, list[Publication]] = {}
        for publication in reversed(publications):
            for peer_id in list(publication.holders):
                held.setdefault(peer_id, []).append(publication)
        told: list[Coroutine[Any, Any, bool]] = []
        for peer_id, theirs in held.items():
            peer = self._asker.find_peer(peer_id)
            if peer is None:  # it has left
                _forget_holder(peer_id, theirs)
            else:
                told.append(self._tell(peer, theirs, carrying_seconds))
        num_untold = (await run_all(told)).count(False)
        if num_untold:
            _logger.warning(
                "not all peers could be told that an adapter is withdrawn (%d could not): they "
                "forget it within %.0f minutes",
                num_untold,
                KEEP_SECONDS / 60,
            )
        return num_untold

    async def _tell(
        self, peer: Announcement, publications: Sequence[Publication], carrying_seconds: float
    ) -> bool:
        """Have a peer forget publications, in this order; return whether it has none of them."""
        try:
            async with (
                SuspendAwareTimeout(WITHDRAWAL_SECONDS + carrying_seconds),
                self._asker.lend(Hop(peer, peer.span), takes_turn=False) as link,
            ):
                for publication in publications:
                    asked = AdapterWithdrawal(make_pass_id(), publication.name)
                    await link.ask_kept(asked, carrying_seconds)
                    publication.note(peer.peer_id, None)
        except StaleAnnouncementError:  # it has other blocks, or is another one: it has none
            _forget_holder(peer.peer_id, publications)
        except (TimeoutError, UnavailableError, RefusedError, RemoteProtocolError):
            return False
        return True

    def _expect_carrying_seconds(self) -> float:
        """Return how long what is under way now may hold up a few words."""
        line = self._asker.line
        return min(line.expect_seconds(line.num_bytes), _MOST_CARRYING_SECONDS)


def _forget_holder(peer_id: PeerId, publications: Sequence[Publication]) -> None:
    for publication in publications:
        publication.note(peer_id, None)


def _tell_changed_holders(publication: Publication, *, has_peers: bool) -> None:
    """Warn when blocks lose their last holder, and say when all have one again."""
    missing, before = publication.list_missing(), publication.missing
    if before is None:
        return
    publication.missing = missing
    if missing and not before:
        blocks = ", ".join(map(str, missing))
        advice = ""
        if not has_peers:
            advice = (
                ", and no peer is in reach: unless one of them returns, publish the adapter again "
                "with the address of a running peer"
            )
        _logger.warning("the peers that held the adapter for blocks %s are gone%s", blocks, advice)
    elif before and not missing:
        _logger.warning("peers for all blocks hold the adapter now")


def _list_tasks(publication: Publication) -> list[asyncio.Task[None]]:
    tasks = [upload.task for upload in publication.uploads.values()]
    return tasks + ([publication.renewing] if publication.renewing else [])
