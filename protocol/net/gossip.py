"""A directory whose members also tell each other what they know, so that it outlives its nodes.

The DHT is for meeting. Once a process knows peers of its model, it asks them for announcements as
well, over the same streams as for anything else, and goes on when no node of the DHT answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest

from ..errors import DirectoryError, RefusedError, RemoteProtocolError, UnavailableError
from ..ids import ModelId, PeerId
from ..messages.records import MAX_RECORDS_BYTES, Records
from ..records.announcements import Announcement, PeerState, verify_announcement
from ..records.swarm_records import SwarmRecords
from ..versions import RECORDS_VERSION
from ..wire.codec import check_kind, encode_frame, read_answer
from .clock import AnswerTimeout, Clock
from .dialling import dial, greet_peer
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
"""Peers that are asked side by side."""

_OTHERS_SECONDS = 0.5
"""How long the others of them have to answer as well."""

_MOST_ASKED = 24
"""Peers that are asked before all are taken for gone; half of them may be hints."""

_MOST_TOLD = 12
"""Peers that are told at once what a peer has become."""

_FAILING = Backoff(2.0, 60.0)
"""How long a peer is asked after all others that did not answer."""


class GossipDirectory:
    """The directory of one process, and the peers that it has found. Implements Directory."""

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        clock: Clock,
        rng: random.Random,
        may_ask: Callable[[Announcement], bool],
    ) -> None:
        """Use a directory, and the transport to dial peers that may be asked.

        `close` closes the directory.
        """
        self._directory = directory
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._may_ask = may_ask
        self._failing = Backoffs[PeerId](_FAILING, clock)
        self._read_at: dict[ModelId, float] = {}
        self._announced: PeerState | None = None
        self._has_changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._asked_at = float("-inf")
        self._has_heard = False

    @property
    def records(self) -> SwarmRecords:
        return self._directory.records

    @property
    def addresses(self) -> Sequence[str]:
        return self._directory.addresses

    async def announce(self, record: bytes) -> None:
        """See Directory.announce; one peer that keeps the record is enough.

        Others are told of a new state at once, see `run`.
        """
        own = verify_announcement(record)
        if own.state is not self._announced:
            self._announced = own.state
            self._has_changed.set()
        try:
            await self._directory.announce(record)
        except DirectoryError as error:
            is_known = own in self.records.list_current(own.model_id, self._clock.wall())
            if not is_known or not await self.tell(own.model_id):
                raise
            # A peer may be ended together with its p2pd: it leaves as well as it can.
            level = logging.INFO if own.state is PeerState.OFFLINE else logging.WARNING
            _logger.log(level, "announced to other peers directly, not in the DHT: %s", error)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        """See Directory.lookup; peers are asked where the directory is slow or out of reach."""
        now = self._clock.now()
        known = self.records.list_current(model_id, self._clock.wall())
        is_alone = all(map(self.records.is_own, known))
        if not is_alone and now - self._read_at.get(model_id, float("-inf")) <= max_age_seconds:
            return known
        looking = asyncio.ensure_future(self._directory.lookup(model_id))
        # It may fail while peers are asked, and asyncio would tell the user.
        looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait([looking], timeout=_PATIENCE_SECONDS)
            is_read = looking.done() and not looking.cancelled() and looking.exception() is None
            if is_read:
                self._read_at[model_id] = now
            if is_read or not await self.ask(model_id):
                return await looking
        finally:
            if not looking.done():
                await cancel_all([looking])
        return self.records.list_current(model_id, self._clock.wall())

    async def list_models(self) -> list[ModelId]:
        return await self._directory.list_models()

    async def close(self) -> None:
        await self._directory.close()

    async def run(
        self, model_id: ModelId, period_seconds: float, max_bytes: int = MAX_RECORDS_BYTES
    ) -> None:
        """Ask one peer after the other, until cancelled; tell many when our state has changed."""
        while True:
            # Those who were started together do not all ask at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(period_seconds * self._rng.uniform(0.5, 1.5)):
                    await self._has_changed.wait()
            if self._has_changed.is_set():
                self._has_changed.clear()
                await self.tell(model_id)
            elif peers := self._list_peers(model_id):
                await self._exchange(self._rng.choice(peers[:2]), max_bytes)

    async def ask(self, model_id: ModelId) -> bool:
        """Ask peers until one has told what it knows; return whether one did.

        Those who call while it goes on share what comes of it.
        """
        async with self._turn:
            if self._clock.now() - self._asked_at > _AGAIN_SECONDS:
                self._has_heard = await self._ask_some(model_id)
                self._asked_at = self._clock.now()
        return self._has_heard

    async def tell(self, model_id: ModelId) -> bool:
        """Bring our record to several peers; return whether one of them keeps it."""
        told = self._list_peers(model_id)[:_MOST_TOLD]
        answers = await asyncio.gather(*(self._exchange(peer, MAX_RECORDS_BYTES) for peer in told))
        return any(answer is not None and answer.has_own for answer in answers)

    async def _ask_some(self, model_id: ModelId) -> bool:
        peers = self._list_peers(model_id)
        for start in range(0, len(peers), _AT_ONCE):
            asked = peers[start : start + _AT_ONCE]
            asking = [
                asyncio.create_task(self._exchange(peer, MAX_RECORDS_BYTES)) for peer in asked
            ]
            try:
                for answer in asyncio.as_completed(asking):
                    if await answer is not None:
                        # What the first one told may be next to nothing.
                        await asyncio.wait(asking, timeout=_OTHERS_SECONDS)
                        return True
            finally:
                await cancel_all(asking)
        return False

    def _list_peers(self, model_id: ModelId) -> list[Announcement]:
        """Return peers to ask: announced ones and those that may be back in turns, or else a few
        who lie would keep us from all others.

        Those that did not answer come last: if it was our own line, they are the ones to ask.
        """
        self._failing.forget_expired()
        now = self._clock.wall()
        announced = [
            peer
            for peer in self.records.list_current(model_id, now)
            if peer.state in (PeerState.ONLINE, PeerState.DRAINING)
        ]
        kinds: list[list[Announcement]] = []
        for peers in (announced, self.records.list_hints(model_id, now)):
            able = [
                peer
                for peer in peers
                if not self.records.is_own(peer) and peer.max_version >= RECORDS_VERSION
                if self._may_ask(peer)
            ]
            self._rng.shuffle(able)
            able.sort(key=self._is_failing)
            kinds.append(able[: _MOST_ASKED // 2])
        in_turns = [peer for pair in zip_longest(*kinds) for peer in pair if peer is not None]
        return sorted(in_turns, key=self._is_failing)

    def _is_failing(self, peer: Announcement) -> bool:
        return not self._failing.may_try(peer.peer_id)

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
            stream = await dial(
                self._transport, self._clock, peer.peer_id, peer.all_endpoints, _ANSWER_SECONDS
            )
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
