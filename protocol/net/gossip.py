"""A directory whose members also tell each other what they know, so that it outlives its nodes.

The DHT is for meeting. Once a process knows peers of its model, it asks them for announcements as
well, over the same streams as for anything else, and goes on when no node of the DHT answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, groupby, islice, zip_longest
from math import isqrt

from ..errors import DirectoryError, RefusedError, RemoteProtocolError, UnavailableError
from ..fair_share import name_network
from ..ids import ModelId, PeerId
from ..messages.codec import check_kind, encode_frame, read_answer
from ..messages.records import MAX_RECORDS_BYTES, Records
from ..records.announcements import Announcement, PeerState, draw_by_address
from ..records.swarm_records import SwarmRecords
from ..versions import RECORDS_VERSION
from .clock import AnswerTimeout, Clock
from .dialling import dial_peer, greet_peer
from .directory import Directory
from .retry import Backoff, Backoffs
from .tasks import cancel_all
from .transport import Transport

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
"""How long one peer may take, from the dial to its records."""

_PATIENCE_SECONDS = 2.0
"""How long the directory is waited for before peers are asked beside it."""

_AGAIN_SECONDS = 1.0
"""How long what peers have told is new enough for everybody who waits for it here."""

_AT_ONCE = 3
"""Peers that are asked side by side at first."""

_SOON_SECONDS = 5.0
"""A client that asks again so soon needs what it was not told."""

_OTHERS_SECONDS = 0.5
"""How long the others of them have to answer as well."""

_MOST_ASKED = 24
"""Peers that are asked before all are taken for gone; where there are hints, these are half."""

_LEAST_TOLD = 12
"""Peers that are told at once what a peer has become: at least so many, else the square root of
those that are known."""

_MOST_TOLD = 32
"""Each costs two machines a TLS handshake."""

_TOLD_BYTES = 5 * 2**10
"""How much they may tell in return."""

_ASKED = PeerState.ONLINE, PeerState.DRAINING
"""Others load their blocks, or have left."""

_FAILING = Backoff(2.0, 60.0)
"""How long a peer is asked after all others that did not answer."""


class _Shared:
    """One attempt at a time for all who want it; it goes on when nobody waits for it any more."""

    def __init__(
        self, attempt: Callable[[], Awaitable[DirectoryError | None]], clock: Clock
    ) -> None:
        """`attempt` returns why it has failed."""
        self._attempt = attempt
        self._clock = clock
        self.task: asyncio.Task[DirectoryError | None] | None = None
        self.began_at = self.ended_at = float("-inf")

    def begin(self, again_seconds: float = 0.0) -> asyncio.Task[DirectoryError | None]:
        """Return the attempt that goes on, or that ended not so long ago; else another one."""
        is_old = self._clock.now() - self.ended_at >= again_seconds
        if self.task is None or (self.task.done() and is_old):
            self.began_at = self._clock.now()
            self.task = asyncio.create_task(self._run())
        return self.task

    async def _run(self) -> DirectoryError | None:
        failure = await self._attempt()
        self.ended_at = self._clock.now()
        return failure


class GossipDirectory:
    """The directory of one process and one model, and the peers that it has found.

    Implements Directory: for other models, it is the directory below.
    """

    def __init__(
        self,
        directory: Directory,
        model_id: ModelId,
        transport: Transport,
        clock: Clock,
        rng: random.Random,
        may_ask: Callable[[Announcement], bool],
    ) -> None:
        """Use a directory, and the transport to dial peers that may be asked.

        `close` closes the directory, `stop` only ends what goes on in the background.
        """
        self._directory = directory
        self._model_id = model_id
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._may_ask = may_ask
        self._failing = Backoffs[PeerId](_FAILING, clock)
        self._reading = _Shared(self._read, clock)
        self._read_at = float("-inf")
        self._asking = _Shared(self._ask, clock)
        self._num_at_once = _AT_ONCE
        self.most_at_once = _AT_ONCE
        """Peers to ask side by side for what others did not tell. Only clients, whose users wait,
        ask many: what a peer looks up may be at a stranger's word."""
        self._announced: PeerState | None = None
        self._has_told_directly = False
        self._has_changed = asyncio.Event()

    @property
    def records(self) -> SwarmRecords:
        return self._directory.records

    @property
    def addresses(self) -> Sequence[str]:
        return self._directory.addresses

    async def announce(self, record: bytes) -> None:
        """See Directory.announce; peers that keep the record are enough, see `tell`.

        Others are told of a new state at once, see `run`.
        """
        own = self.records.add_own(record, self._clock.wall()).announcement
        if own.model_id != self._model_id:
            await self._directory.announce(record)
            return
        if own.state is not self._announced:
            self._announced = own.state
            self._has_changed.set()
        try:
            await self._directory.announce(record)
            self._has_told_directly = False
        except DirectoryError as error:
            if not await self.tell():
                raise
            # A peer may be ended together with its p2pd: it leaves as well as it can.
            is_no_news = self._has_told_directly or own.state is PeerState.OFFLINE
            level = logging.INFO if is_no_news else logging.WARNING
            _logger.log(level, "announced to other peers directly, not in the DHT: %s", error)
            self._has_told_directly = True

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        """See Directory.lookup; where the directory is slow or out of reach, peers are asked.

        The first that tells anything is enough, and what others wait for already.
        """
        if model_id != self._model_id:
            return await self._directory.lookup(model_id, max_age_seconds)
        is_alone = all(map(self.records.is_own, self._list_current()))
        if is_alone or self._clock.now() - self._read_at > max_age_seconds:
            reading = self._reading.begin()
            patience = self._reading.began_at + _PATIENCE_SECONDS - self._clock.now()
            heard, going_on = await asyncio.wait([reading], timeout=max(0.0, patience))
            if not _have_succeeded(heard):
                going_on.add(self._asking.begin(_AGAIN_SECONDS))
            while going_on and not _have_succeeded(heard):
                heard, going_on = await asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED)
            if not _have_succeeded(heard) and (failure := reading.result()) is not None:
                raise copy(failure)
        return self._list_current()

    async def stop(self) -> None:
        """End what was begun and nobody waits for."""
        await cancel_all(filter(None, (self._reading.task, self._asking.task)))

    async def list_models(self) -> list[ModelId]:
        return await self._directory.list_models()

    async def close(self) -> None:
        await self.stop()
        await self._directory.close()

    async def run(self, period_seconds: float, max_bytes: int = MAX_RECORDS_BYTES) -> None:
        """Ask one peer after the other, until cancelled; tell many when our state has changed."""
        while True:
            # Those who were started together do not all ask at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(period_seconds * self._rng.uniform(0.5, 1.5)):
                    await self._has_changed.wait()
            if self._has_changed.is_set():
                self._has_changed.clear()
                await self.tell()
            elif peers := self._draw_peers(2):
                await self._exchange(self._rng.choice(peers), max_bytes)

    async def tell(self) -> bool:
        """Bring our record to several peers; return whether enough of them keep it.

        One may lie: where several networks answer, it takes two.
        """
        most = min(max(_LEAST_TOLD, isqrt(len(self._list_current()))), _MOST_TOLD)
        told = self._draw_peers(most)
        answers = await asyncio.gather(*(self._exchange(peer, _TOLD_BYTES) for peer in told))
        answered = {
            (_find_network(peer), answer.has_own)
            for peer, answer in zip(told, answers, strict=True)
            if answer is not None
        }
        num_keeping = sum(has_own for _, has_own in answered)
        return num_keeping > 0 and num_keeping >= min(2, len({network for network, _ in answered}))

    def _list_current(self) -> list[Announcement]:
        return self.records.list_current(self._model_id, self._clock.wall())

    async def _read(self) -> DirectoryError | None:
        try:
            await self._directory.lookup(self._model_id)
        except DirectoryError as error:
            return error
        self._read_at = self._clock.now()
        return None

    async def _ask(self) -> DirectoryError | None:
        """Ask peers until one has told what it knows: twice as many as before at a time where these
        were silent, or the caller needs what they did not tell.
        """
        # Among few, each of a few knows: a newcomer tells twelve.
        most_at_once = min(self.most_at_once, max(_AT_ONCE, len(self._list_current()) // 4))
        is_soon = self._clock.now() - self._asking.ended_at < _SOON_SECONDS
        self._num_at_once = min(2 * self._num_at_once, most_at_once) if is_soon else _AT_ONCE
        num_at_once, resting = self._num_at_once, self._failing.resting
        drawn = self._draw_peers(_MOST_ASKED)
        for _, group in groupby(drawn, lambda peer: peer.peer_id in resting):
            peers = list(group)
            while peers:
                asked, peers = peers[:num_at_once], peers[num_at_once:]
                if await self._ask_any(asked):
                    return None
                num_at_once *= 2
        return DirectoryError("no peer that is known tells of others")

    async def _ask_any(self, peers: Sequence[Announcement]) -> bool:
        """Ask peers side by side, and return whether one has told what it knows."""
        asking = [asyncio.create_task(self._exchange(peer, MAX_RECORDS_BYTES)) for peer in peers]
        try:
            for answer in asyncio.as_completed(asking):
                if await answer is not None:
                    # What the first one told may be next to nothing.
                    await asyncio.wait(asking, timeout=_OTHERS_SECONDS)
                    return True
        finally:
            await cancel_all(asking)
        return False

    def _draw_peers(self, most: int) -> list[Announcement]:
        """Return peers to ask, one of each address, in the order in which to ask them.

        Announced ones and hints take turns, so that made-up announcements do not hide those that
        may be back. Peers that did not answer come last: the fault may have been our own line.
        """
        self._failing.forget_expired()
        resting = self._failing.resting

        def choose(peers: Iterable[Announcement]) -> Iterator[Announcement]:
            able = [peer for peer in peers if self._can_ask(peer)]
            for is_resting in (False, True):
                group = (peer for peer in able if (peer.peer_id in resting) is is_resting)
                yield from draw_by_address(group, self._rng)

        announced = (peer for peer in self._list_current() if peer.state in _ASKED)
        hints = self.records.list_hints(self._model_id, self._clock.wall())
        drawn = filter(None, chain.from_iterable(zip_longest(choose(announced), choose(hints))))
        return sorted(islice(drawn, most), key=lambda peer: peer.peer_id in resting)

    def _can_ask(self, peer: Announcement) -> bool:
        is_able = peer.max_version >= RECORDS_VERSION and not self.records.is_own(peer)
        return is_able and self._may_ask(peer)

    async def _exchange(self, peer: Announcement, max_bytes: int) -> Records | None:
        """Ask one peer and take what is valid; return its answer, None where nothing was."""
        try:
            answer = await self._fetch(peer, max_bytes)
        except RefusedError as error:  # it loads its blocks, or has too many streams
            _logger.debug("peer …%s refused to tell of others: %s", peer.peer_id[-6:], error)
            return None
        except (UnavailableError, RemoteProtocolError) as error:
            _logger.debug("peer …%s told nothing of others: %s", peer.peer_id[-6:], error)
            self._failing.note_failure(peer.peer_id)
            return None
        num_taken, now = 0, self._clock.wall()
        for num in self.records.take_in_turns(peer.model_id, answer.records, now):
            num_taken += num
            await asyncio.sleep(0)
        self._failing.note_success(peer.peer_id)
        return answer if num_taken else None

    async def _fetch(self, peer: Announcement, max_bytes: int) -> Records:
        name = f"peer …{peer.peer_id[-6:]}"
        question = self.records.make_fetch(peer.model_id, self._clock.wall(), self._rng, max_bytes)
        async with AnswerTimeout(_ANSWER_SECONDS, f"{name} did not answer in time"):
            stream = await dial_peer(self._transport, self._clock, peer, _ANSWER_SECONDS)
            welcome, _ = await greet_peer(stream, peer.peer_id, self._clock)
            try:
                if welcome.model_id != peer.model_id:
                    raise RemoteProtocolError(f"{name} serves another model now")
                await stream.send(encode_frame(question))
                answer = read_answer(await stream.receive(), name, question.question)
            finally:
                await stream.close()
        records = check_kind(answer, Records, name)
        if sum(map(len, records.records)) > max_bytes:
            raise RemoteProtocolError(f"{name} told more than it was asked for")
        return records


def _have_succeeded(tasks: Iterable[asyncio.Task[DirectoryError | None]]) -> bool:
    return any(task.result() is None for task in tasks)


def _find_network(peer: Announcement) -> str:
    return name_network(peer.endpoints[0].host if peer.endpoints else None)
