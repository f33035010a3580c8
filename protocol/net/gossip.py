"""A directory whose members also tell each other what they know, so that it outlives its nodes.

The DHT is for meeting. Once a process knows peers of its model, it asks them for announcements as
well, over the same streams as for anything else, and goes on when no node of the DHT answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_bytes

from ..errors import DirectoryError, RefusedError, RemoteProtocolError, UnavailableError
from ..ids import ModelId, PeerId, SessionId
from ..messages.records import MAX_NAMED_RECORDS, MAX_RECORDS_BYTES, RecordFetch, Records
from ..records.announcements import Announcement, KnownRecord, PeerState, verify_announcement
from ..records.record_exchange import choose_records, join_digests, split_digests
from ..versions import RECORDS_VERSION
from ..wire.codec import check_kind, encode_frame, read_answer
from .clock import AnswerTimeout, Clock
from .dialling import dial, greet_peer
from .directory import Directory
from .retry import Backoff, Backoffs
from .transport import Transport

_logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
"""How long one peer may take, from the dial to its records."""

_AT_ONCE = 3
"""Peers that are asked side by side: one that is paused keeps nobody waiting."""

_MOST_ASKED = 24
"""Peers that are asked before all are taken for gone."""

_MOST_TOLD = 12
"""Peers that are told at once what a peer has become."""

_CHECKED_AT_ONCE = 16
"""Records that are checked before others get their turn: each takes 0.2 ms."""

_FAILING = Backoff(2.0, 300.0)
"""How long a peer is not asked again that did not answer."""


class GossipDirectory:
    """A directory and the peers that it has found. Implements Directory.

    Made for one process, which is the peer `own_id` or a client (None).
    """

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        clock: Clock,
        rng: random.Random,
        own_id: PeerId | None = None,
    ) -> None:
        """Use a directory, and the transport to dial peers with; `close` closes the directory."""
        self._directory = directory
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._own_id = own_id
        self._failing = Backoffs[PeerId](_FAILING, clock)
        self._announced: PeerState | None = None
        self._has_changed = asyncio.Event()

    @property
    def addresses(self) -> Sequence[str]:
        return self._directory.addresses

    async def announce(self, record: bytes) -> None:
        """See Directory.announce; one peer that takes the record is enough.

        Others are told of a new state at once, see `run`.
        """
        own = verify_announcement(record)
        if own.state is not self._announced:
            self._announced = own.state
            self._has_changed.set()
        try:
            await self._directory.announce(record)
        except DirectoryError as error:
            is_known = own in [one.announcement for one in self.list_records(own.model_id)]
            if not is_known or not await self.ask(own.model_id):
                raise
            _logger.info("announced to other peers only: %s", error)

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """See Directory.lookup; peers are asked where the directory cannot be reached."""
        try:
            return await self._directory.lookup(model_id)
        except DirectoryError:
            if not await self.ask(model_id):
                raise
        return [known.announcement for known in self.list_records(model_id)]

    def list_records(self, model_id: ModelId) -> list[KnownRecord]:
        return self._directory.list_records(model_id)

    def list_hints(self, model_id: ModelId) -> list[Announcement]:
        return self._directory.list_hints(model_id)

    def take_record(self, value: bytes) -> Announcement:
        return self._directory.take_record(value)

    async def close(self) -> None:
        await self._directory.close()

    async def run(
        self, model_id: ModelId, period_seconds: float, max_bytes: int = MAX_RECORDS_BYTES
    ) -> None:
        """Ask one peer after the other, until cancelled; several when our own state has changed.

        With less than `MAX_RECORDS_BYTES` the question does not name what is known: it would take
        more than the answer.
        """
        while True:
            # Those who were started together do not all ask at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(period_seconds * self._rng.uniform(0.5, 1.5)):
                    await self._has_changed.wait()
            num_at_once = _MOST_TOLD if self._has_changed.is_set() else 1
            self._has_changed.clear()
            await self.ask(model_id, max_bytes, num_at_once)

    async def ask(
        self,
        model_id: ModelId,
        max_bytes: int = MAX_RECORDS_BYTES,
        num_at_once: int = _AT_ONCE,
    ) -> bool:
        """Ask peers until some have told what they know; return whether one did.

        Those whose announcement holds come first, in any order, then those that may be back.
        """
        self._failing.forget_expired()
        current = [known.announcement for known in self.list_records(model_id)]
        self._rng.shuffle(current)
        peers = [
            peer
            for peer in (*current, *self.list_hints(model_id))
            if peer.peer_id != self._own_id and peer.max_version >= RECORDS_VERSION
            if self._failing.may_try(peer.peer_id)
        ][:_MOST_ASKED]
        for start in range(0, len(peers), num_at_once):
            asked = peers[start : start + num_at_once]
            if any(await asyncio.gather(*(self._ask(peer, max_bytes) for peer in asked))):
                return True
        return False

    async def _ask(self, peer: Announcement, max_bytes: int) -> bool:
        """Ask one peer; return whether it told something that is true."""
        try:
            heard = await self._exchange(peer, max_bytes)
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            _logger.debug("peer …%s told nothing of others: %s", peer.peer_id[-6:], error)
            heard = 0
        if heard:
            self._failing.note_success(peer.peer_id)
        else:
            self._failing.note_failure(peer.peer_id)
        return heard > 0

    async def _exchange(self, peer: Announcement, max_bytes: int) -> int:
        name = f"peer …{peer.peer_id[-6:]}"
        question = self._make_question(peer.model_id, max_bytes)
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
        num_taken = 0
        for number, record in enumerate(check_kind(answer, Records, name).records, 1):
            num_taken += _take(self, peer.model_id, record)
            if number % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return num_taken

    def _make_question(self, model_id: ModelId, max_bytes: int) -> RecordFetch:
        known = self.list_records(model_id)
        own = (one.value for one in known if one.announcement.peer_id == self._own_id)
        named = self._rng.sample(known, min(len(known), MAX_NAMED_RECORDS))
        digests = join_digests(named) if max_bytes >= MAX_RECORDS_BYTES else b""
        return RecordFetch(SessionId(token_bytes(16)), next(own, b""), digests, max_bytes)


def answer_fetch(
    directory: Directory, model_id: ModelId, fetch: RecordFetch, own_id: PeerId, rng: random.Random
) -> Records:
    """Take what somebody tells of itself, and return what it lacks, our own record first."""
    if fetch.own:
        _take(directory, model_id, fetch.own)
    records, known = directory.list_records(model_id), split_digests(fetch.known)
    return Records(fetch.question, choose_records(records, known, fetch.max_bytes, rng, own_id))


def _take(directory: Directory, model_id: ModelId, record: bytes) -> bool:
    """Remember what a stranger told, if it is valid; return whether it is, and of our model."""
    try:
        return directory.take_record(record).model_id == model_id
    except RemoteProtocolError as error:
        _logger.debug("refused an announcement that a peer told: %s", error)
        return False
