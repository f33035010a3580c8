"""What one process knows of its swarm: announcements by model, and which peers were revoked.

Records travel as values that name the swarm; in a private one they are sealed, and an announcement
comes with the certificate that its peer may serve. Junk, records of strangers and replays of older
records are refused, and so are those of peers that the owner has revoked.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice

from ..errors import (
    DirectoryError,
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    RevokedError,
)
from ..fair_share import BUSY_SECONDS, Holder, RecentCosts
from ..ids import NO_MODEL, ModelId, SessionId
from ..membership.membership import (
    NO_MEMBERSHIP,
    NONCE_BYTES,
    SWARM_ID_BYTES,
    Membership,
    Revocations,
    read_revocations,
)
from ..messages.records import (
    DIGEST_BYTES,
    MAX_NAMED_RECORDS,
    MAX_RECORDS_BYTES,
    RecordFetch,
    Records,
)
from .announcement_book import AnnouncementBook, digest_record
from .announcements import (
    Announcement,
    KnownRecord,
    PeerState,
    check_is_current,
    draw,
    read_announcement,
)

_REVOCATIONS = b"shoal revocations\0"
"""What the value of the owner's list begins with; that of an announcement with a certificate."""

_CHECKED_AT_ONCE = 16
"""Records that are checked before others get their turn: each takes 0.3 ms."""

_COST_BYTES = 5 * 2**10
"""So many bytes of names and of the answer count as one, as does a record, checked in 0.3 ms."""

_MOST_DRAWN = 2000
"""Records that are looked at for one answer, which holds about 120."""

_COST_RECORDS = 400
"""So many known records, looked through for an answer in 0.3 ms, count as one."""

_NAMED_OF_EACH_MODEL = 4
"""Records that are named in a question for models: one that the other has as well is enough."""

_LEAST_RECORD_BYTES = 64
"""Of a signature alone: whoever asks for less only tells, and nothing is looked through."""

_MOST_COST = 2000
"""Of all strangers in ten seconds: 6 % of a core and 1 MB/s. 6,000 peers that announce themselves
to the same nodes every 30 s cost that."""

_CERTAIN_COST = 32
"""Of each stranger whatever others take: three of the longest answers."""


class SwarmRecords:
    """Remembers records of one swarm, tells them to others and takes what others tell.

    `now` is in wall seconds throughout.
    """

    def __init__(
        self, membership: Membership = NO_MEMBERSHIP, book: AnnouncementBook | None = None
    ) -> None:
        self.membership = membership
        self.revocations = Revocations()
        """The newest list of the owner that is known."""
        self._revocations_value = b""
        self._budget = RecentCosts(_MOST_COST, 10.0, _CERTAIN_COST)
        self._book = AnnouncementBook() if book is None else book

    # ---- what is known

    def add_own(self, record: bytes, now: float) -> KnownRecord:
        """Remember a record of ours, which never gives way; return what is known of it then.

        Raises LocalProtocolError when it is not valid, DirectoryError when a newer one is known,
        RevokedError when the owner has revoked us, UsageError when we may not serve.
        """
        try:
            announcement = read_announcement(record, now)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"our own announcement is not valid: {error}") from error
        if announcement.peer_id in self.revocations.peer_ids:
            raise RevokedError(
                f"the owner of the swarm has revoked this peer, {announcement.peer_id}: members "
                "now ignore its announcements; ask the owner for access"
            )
        value = self.seal(self.membership.certify(announcement.peer_id) + record)
        try:
            return self._book.add_own(announcement.model_id, announcement, value, now)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory refused our announcement: {error}") from error

    def reserve(self, model_id: ModelId) -> None:
        """Keep the room of a model for it from now on: we use it."""
        self._book.reserve(model_id)

    def list_current(self, model_id: ModelId, now: float) -> list[Announcement]:
        """Return the announcements that hold, the newest of each peer."""
        return [known.announcement for known in self.list_records(model_id, now)]

    def list_records(self, model_id: ModelId, now: float) -> list[KnownRecord]:
        """Return the same with the values that other members take."""
        known, revoked = self._book.list_records(model_id, now), self.revocations.peer_ids
        if not revoked:
            return known
        return [one for one in known if one.announcement.peer_id not in revoked]

    def list_models(self, now: float) -> list[ModelId]:
        """Return the models that somebody serves, or is about to, in any order."""
        return [model_id for model_id, peers in self._list_by_model(now) if peers]

    def _list_by_model(self, now: float) -> Iterator[tuple[ModelId, list[KnownRecord]]]:
        """Yield each model with the records of its peers that have not left."""
        for model_id in map(ModelId, self._book.list_scopes()):
            records = self.list_records(model_id, now)
            yield (
                model_id,
                [one for one in records if one.announcement.state is not PeerState.OFFLINE],
            )

    def list_hints(self, model_id: ModelId, now: float) -> list[Announcement]:
        """Return announcements that have expired within a day, the newest first.

        They tell whom to dial, and nothing else: never route to them, count them or hand them on.
        """
        hints = self._book.list_hints(model_id, now)
        return [one for one in hints if one.peer_id not in self.revocations.peer_ids]

    def is_known(self, value: bytes) -> bool:
        """Return whether a value of an announcement has been taken already."""
        return self._book.find(value) is not None

    def is_own(self, announcement: Announcement) -> bool:
        """Return whether a peer of this process has made an announcement."""
        return self._book.is_own(announcement.peer_id)

    # ---- values

    def seal(self, content: bytes) -> bytes:
        """Return what only members can read, and is taken for a message of this swarm."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self.membership.swarm_id + self.membership.seal(content, nonce)

    def open(self, value: bytes) -> bytes:
        """Undo `seal`; raises RemoteProtocolError."""
        if not value.startswith(self.membership.swarm_id):
            raise RemoteProtocolError("the record is of another swarm")
        return self.membership.open(value[SWARM_ID_BYTES:])

    def seal_revocations(self, record: bytes) -> bytes:
        """Return the value of a list that the owner has signed."""
        return self.seal(_REVOCATIONS + record)

    def take(self, model_id: ModelId, value: bytes, now: float) -> None:
        """Remember the value of an announcement of a model, or of the owner's list.

        With NO_MODEL it may be of any model. Raises RemoteProtocolError if it is not valid, of
        another model or swarm, or older than what is known.
        """
        announcement = self._book.find(value)
        if announcement is not None:
            check_is_current(announcement, now)
        else:
            content = self.open(value)
            if content.startswith(_REVOCATIONS):
                return self._take_revocations(content.removeprefix(_REVOCATIONS), value)
            announcement = self.open_announcement(content, now)
        if announcement.peer_id in self.revocations.peer_ids:
            raise RemoteProtocolError(f"the owner has revoked peer {announcement.peer_id}")
        if model_id not in (announcement.model_id, NO_MODEL):
            raise RemoteProtocolError("the record is of another model")
        self._book.add(announcement.model_id, announcement, value, now)

    def open_announcement(self, content: bytes, now: float) -> Announcement:
        """Return what the content of a value announces, if its peer may serve."""
        num_bytes = self.membership.certificate_bytes
        certificate, record = content[:num_bytes], content[num_bytes:]
        announcement = read_announcement(record, now)
        if not self.membership.is_certified(announcement.peer_id, certificate):
            raise RemoteProtocolError("this peer has no certificate to serve in this swarm")
        return announcement

    def _take_revocations(self, record: bytes, value: bytes) -> None:
        if value == self._revocations_value:
            return
        found = read_revocations(self.membership, record)
        if found.sequence < self.revocations.sequence:
            raise RemoteProtocolError("a newer revocation list is already known")
        # The owner may have made it without finding this list: nobody is let in again by it.
        revoked = found.peer_ids | self.revocations.peer_ids
        self.revocations, self._revocations_value = replace(found, peer_ids=revoked), value

    # ---- exchange

    def make_fetch(
        self, model_id: ModelId, now: float, rng: random.Random, max_bytes: int = MAX_RECORDS_BYTES
    ) -> RecordFetch:
        """Return the question for records that are not known here; it brings our own.

        With NO_MODEL it asks which models there are: for a record of each that is not known here.
        """
        known = self.list_records(model_id, now)
        if model_id == NO_MODEL:
            known = [
                one
                for _, peers in self._list_by_model(now)
                for one in rng.sample(peers, min(len(peers), _NAMED_OF_EACH_MODEL))
            ]
        own = next((one.value for one in self._book.list_own(model_id, now)), b"")
        named = [digest_record(self._revocations_value)] if self._revocations_value else []
        if max_bytes >= MAX_RECORDS_BYTES:  # else the names would take more than the answer
            chosen = rng.sample(known, min(len(known), MAX_NAMED_RECORDS - 1))
            named += [one.digest for one in chosen]
        return RecordFetch(SessionId(secrets.token_bytes(16)), own, b"".join(named), max_bytes)

    def answer(
        self,
        stranger: Holder,
        model_id: ModelId,
        fetch: RecordFetch,
        now: float,
        rng: random.Random,
    ) -> Records:
        """Take what a stranger tells of itself; return what it lacks of a model.

        Raises RefusedError when it asks for more than is left for others.
        """
        is_asking = fetch.max_bytes >= _LEAST_RECORD_BYTES
        num_known = len(self._book) if model_id == NO_MODEL else self._book.count(model_id)
        num_read = num_known if is_asking else 0
        num_bytes = fetch.max_bytes + len(fetch.known)
        cost = 1 + num_bytes // _COST_BYTES + num_read // _COST_RECORDS
        if not self._budget.take(stranger, cost, now):
            raise RefusedError(ErrorCode.BUSY, "you ask for too many announcements", BUSY_SECONDS)
        has_own = bool(fetch.own) and self.take_all(model_id, [fetch.own], now) == 1
        known, revocations = split_digests(fetch.known), self._revocations_value
        room = fetch.max_bytes - len(revocations)
        is_lacking = bool(revocations) and digest_record(revocations) not in known
        told = (revocations,) if is_lacking and room >= 0 else ()
        records: Collection[KnownRecord] = ()
        if is_asking and model_id == NO_MODEL:
            records = self._draw_of_each_model(known, now, rng)
        elif is_asking:
            records = self.list_records(model_id, now)
        own = self._book.list_own(model_id, now) if is_asking else ()
        chosen = choose_records(own, records, known, room if told else fetch.max_bytes, rng)
        return Records(fetch.question, (*told, *chosen), has_own)

    def _draw_of_each_model(
        self, known: Collection[bytes], now: float, rng: random.Random
    ) -> list[KnownRecord]:
        """Return a record of each model of which none of the `known` ones is."""
        return [
            rng.choice(peers)
            for _, peers in self._list_by_model(now)
            if peers and not any(one.digest in known for one in peers)
        ]

    def take_all(self, model_id: ModelId, values: Iterable[bytes], now: float) -> int:
        """Take what is valid of what a stranger told; return how many were."""
        return sum(self.take_in_turns(model_id, values, now))

    def take_in_turns(
        self, model_id: ModelId, values: Iterable[bytes], now: float
    ) -> Iterator[int]:
        """Do the same in steps after which others may have their turn; yield how many each took."""
        num_taken = 0
        for number, value in enumerate(values, 1):
            with suppress(RemoteProtocolError):
                self.take(model_id, value, now)
                num_taken += 1
            if number % _CHECKED_AT_ONCE == 0:
                yield num_taken
                num_taken = 0
        yield num_taken


# ---- which records are told


def split_digests(joined: bytes) -> frozenset[bytes]:
    """Return the names in a question."""
    starts = range(0, len(joined), DIGEST_BYTES)
    return frozenset(joined[start : start + DIGEST_BYTES] for start in starts)


def choose_records(
    own: Sequence[KnownRecord],
    records: Collection[KnownRecord],
    known: Collection[bytes],
    max_bytes: int,
    rng: random.Random,
) -> tuple[bytes, ...]:
    """Return the values to tell somebody who has the `known` ones, as many as `max_bytes` hold.

    Our `own` comes first, also if it is known: it shows that we live. The others are drawn
    anew each time; those that add a block which nobody before them serves come before the rest. A
    node of the DHT that serves another model knows no number of blocks, and tells in any order: it
    is asked until it has no more. Of very many records, only some are looked at for one answer.
    """
    num_blocks = own[0].announcement.num_blocks if own else 0
    known = {*known, *(one.digest for one in own)}
    drawn = islice(draw(list(records), rng), _MOST_DRAWN)
    others = (one for one in drawn if one.digest not in known)
    chosen: list[bytes] = []
    num_bytes = 0
    for record in chain(own, _draw_by_cover(others, num_blocks)):
        num_bytes += len(record.value)
        if num_bytes > max_bytes:
            break
        chosen.append(record.value)
    return tuple(chosen)


def _draw_by_cover(drawn: Iterator[KnownRecord], num_blocks: int) -> Iterator[KnownRecord]:
    """Yield records, those first that add to the blocks which the ones before them serve."""
    missing = set(range(num_blocks))
    skipped: list[KnownRecord] = []
    while missing and (record := next(drawn, None)) is not None:
        peer = record.announcement
        # How many blocks there are is for us to say: strangers say what they like.
        is_serving = peer.state is PeerState.ONLINE and peer.num_blocks == num_blocks
        added = missing.intersection(range(peer.span.start, peer.span.stop)) if is_serving else ()
        missing.difference_update(added)
        if added:
            yield record
        else:
            skipped.append(record)
    yield from skipped
    yield from drawn
