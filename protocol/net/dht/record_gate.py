"""The records of a replicated directory: how they travel, and which are let in.

`RecordGate` admits a record only if its peer signed it for that very key.

A question for what stands under a key says what is known already, in a few bytes for each record;
of a thousand records, mostly the renewed ones travel (hivemind sends everything, and each replica
does so each time). What is too much for one answer comes with the next: so a slow link gets on, and
a liar cannot send more at once than is soon checked.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ... import limits
from ...errors import RemoteProtocolError, RevokedError
from ...ids import ModelId, PeerId
from ...membership.membership import (
    NONCE_BYTES,
    SWARM_ID_BYTES,
    Membership,
    Revocations,
    make_public,
    read_revocations,
)
from ...records.announcement_book import AnnouncementBook
from ...records.announcements import Announcement, KnownRecord
from ..clock import Clock

_logger = logging.getLogger(__name__)

_MAX_RECORDS_PER_KEY = 4 * 2**20 // (limits.MAX_ANNOUNCEMENT_BYTES + 256)
"""How many surely fit into 4 MiB with what belongs to them. The DHT sends all that stand under a
key in one message and can send no larger one: who stored more could not be asked any more."""

QUESTION = "shoal.records.1"
"""The name of the libp2p protocol that carries a question there and an answer back."""

KEY_BYTES = 20
"""A key of the DHT, digested."""

MAX_KNOWN = 4096
"""How many records a question may name."""

MAX_ANSWER_BYTES = 128 * 2**10
"""It arrives within the 1.5 s that an answer may take where a link carries 0.7 Mbit/s."""

_DIGEST_BYTES = 8
_HEAD = struct.Struct("!BHd")  # lengths of sub-key and value, and the wall second of the expiry


class RecordGate:
    """Checks entries of the DHT and remembers what passed. Owned by one node.

    An entry stands under (key of swarm and model, peer id) with the expiry of its announcement,
    and names the swarm itself, so that public swarms may share one DHT. In a private swarm it is
    sealed, and holds the certificate that the peer may serve. Junk, foreign writers and replays
    of older records are refused, and so is whoever the owner has revoked.
    """

    REVOCATIONS = "revocations"
    """The subkey under which the owner's list stands; no peer id looks like this."""

    def __init__(
        self,
        membership: Membership,
        clock: Clock,
        digest_key: Callable[[str], bytes],
        pack: Callable[[str | bytes], bytes],
        max_records: int = _MAX_RECORDS_PER_KEY,
    ) -> None:
        """Make a gate for a DHT that digests keys and packs subkeys and values like this."""
        self.membership = membership
        self._clock = clock
        self._digest_key = digest_key
        self._pack = pack
        self._book = AnnouncementBook(max_records, 10 * max_records)
        self._revocations_record = b""
        self.revocations = Revocations()
        """The newest list that was found."""
        # The same values come again and again, and a certificate takes 0.1 ms to check.
        self._open = lru_cache(maxsize=max_records)(self._open_anew)

    def when_displaced(self, forget: Callable[[str, PeerId], None]) -> None:
        """Have `forget` called with the key and the subkey of each record that had to go.

        It goes for another one, and must not stay stored either.
        """
        self._book.on_displaced = forget

    def read(self, record: bytes) -> Announcement:
        """Return the announcement in a record that holds now; raises RemoteProtocolError."""
        return self._book.read(record, self._clock.wall())

    def wall(self) -> float:
        """Return the wall seconds that this gate goes by."""
        return self._clock.wall()

    def latest_expiry(self) -> float:
        """Return the last wall second until which anything may be stored now."""
        return self._clock.wall() + limits.MAX_ANNOUNCEMENT_LIFETIME_SECONDS

    def add_own(self, model_id: ModelId, record: bytes) -> bytes:
        """Remember a record of ours; return the value for the DHT, the same that peers are told.

        Raises RemoteProtocolError when a newer one is known, RevokedError when the owner has
        revoked us.
        """
        peer_id = self.read(record).peer_id
        if peer_id in self.revocations.peer_ids:
            raise RevokedError(
                f"the owner of the swarm has revoked this peer, {peer_id}: members now ignore its "
                "announcements; ask the owner for access"
            )
        now, value = self._clock.wall(), self.wrap(record)
        self._book.add_own(self.key_of(model_id), record, now, value)
        return value

    def watch(self, model_id: ModelId) -> str:
        """Return the key of a model in our swarm, and have room for what is found there."""
        key = self.key_of(model_id)
        self._book.reserve(key)
        return key

    def list_current(self, model_id: ModelId) -> list[Announcement]:
        """Return what passed, is the newest of its peer and holds now."""
        return [known.announcement for known in self.list_records(model_id)]

    def list_records(self, model_id: ModelId) -> list[KnownRecord]:
        """Return the same with the values that members of the swarm take."""
        found = self._book.list_records(self.key_of(model_id), self._clock.wall())
        revoked = self.revocations.peer_ids
        return [known for known in found if known.announcement.peer_id not in revoked]

    def list_hints(self, model_id: ModelId) -> list[Announcement]:
        """Return what has expired, the newest first, of peers that may still be there."""
        found = self._book.list_hints(self.key_of(model_id), self._clock.wall())
        return [peer for peer in found if peer.peer_id not in self.revocations.peer_ids]

    def take(self, model_id: ModelId, value: bytes) -> Announcement:
        """Remember a value that a peer of a model has sent; raises RemoteProtocolError."""
        if not value.startswith(self.membership.swarm_id):
            raise RemoteProtocolError("the record is of another swarm")
        _, record = self._open(value)
        announcement = self.read(record)
        self._check_not_revoked(announcement.peer_id)
        if announcement.model_id != model_id:
            raise RemoteProtocolError("the record is of another model")
        return self._book.add(self.key_of(model_id), record, self._clock.wall(), value)

    def key_of(self, model_id: ModelId) -> str:
        """Return the key of a model in our swarm."""
        return _make_key(self.membership.swarm_id, model_id)

    @property
    def revocations_key(self) -> str:
        """The key under which the owner's list of our swarm stands."""
        return _make_key(self.membership.swarm_id, self.REVOCATIONS)

    def wrap(self, record: bytes) -> bytes:
        """Return the value that stands in the DHT for a record of ours.

        Raises UsageError when we may not serve.
        """
        certificate = self.membership.certify(self.read(record).peer_id)
        return self._seal(certificate + record)

    def wrap_revocations(self, record: bytes | None = None) -> bytes:
        """Return the value for the owner's list, the newest one by default; empty without any."""
        record = self._revocations_record if record is None else record
        return self._seal(record) if record else b""

    def _seal(self, content: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self.membership.swarm_id + self.membership.seal(content, nonce)

    def accept(
        self, key_digest: bytes, packed_subkey: bytes, packed_value: bytes, expires_at: float
    ) -> bool:
        """Return whether an entry may stand there, and remember it then. Never raises."""
        try:
            value = self._unpack_bytes(packed_value)
            if packed_subkey == self._pack(self.REVOCATIONS):
                self._accept_revocations(key_digest, value, expires_at)
                return True
            swarm_id, record = self._open(value)
            announcement = self.read(record)
            self._check_not_revoked(announcement.peer_id)
            key = _make_key(swarm_id, announcement.model_id)
            if (
                key_digest == self._digest_key(key)
                and packed_subkey == self._pack(announcement.peer_id)
                and expires_at == announcement.expires_at
            ):
                self._book.add(key, record, self._clock.wall(), value)
                return True
        except RemoteProtocolError as error:
            _logger.debug("refused a record of the directory: %s", error)
        return False

    def _open_anew(self, value: bytes) -> tuple[bytes, bytes]:
        """Return swarm id and record of a value, if its swarm lets the peer of it serve."""
        swarm_id, sealed = value[:SWARM_ID_BYTES], value[SWARM_ID_BYTES:]
        membership = self.membership
        if swarm_id != membership.swarm_id:
            if membership.is_private or len(swarm_id) < SWARM_ID_BYTES:
                raise RemoteProtocolError("the record is of another swarm")
            membership = make_public(swarm_id)
        content = membership.open(sealed)
        num_bytes = membership.certificate_bytes
        certificate, record = content[:num_bytes], content[num_bytes:]
        if not membership.is_certified(self.read(record).peer_id, certificate):
            raise RemoteProtocolError("this peer has no certificate to serve in this swarm")
        return swarm_id, record

    def _accept_revocations(self, key_digest: bytes, value: bytes, expires_at: float) -> None:
        """Take the owner's list, from any peer; raises RemoteProtocolError if it is invalid."""
        is_ours = value.startswith(self.membership.swarm_id)
        if not is_ours or key_digest != self._digest_key(self.revocations_key):
            raise RemoteProtocolError("the revocation list is stored under a wrong key")
        if expires_at > self.latest_expiry() + limits.MAX_CLOCK_SKEW_SECONDS:
            raise RemoteProtocolError("the revocation list expires too late")
        record = self.membership.open(value[SWARM_ID_BYTES:])
        found = read_revocations(self.membership, record)
        if found.sequence < self.revocations.sequence:
            raise RemoteProtocolError("a newer revocation list is already known")
        if found.sequence > self.revocations.sequence:
            # hivemind keeps what expires later, and a member whose clock is ahead renewed the old.
            self._book.on_displaced(self.revocations_key, PeerId(self.REVOCATIONS))
        self.revocations, self._revocations_record = found, record

    def _check_not_revoked(self, peer_id: PeerId) -> None:
        if peer_id in self.revocations.peer_ids:
            raise RemoteProtocolError(f"the owner of the swarm has revoked peer {peer_id}")

    def _unpack_bytes(self, packed: bytes) -> bytes:
        """Undo MSGPack for byte strings of 8 or 16 bit length only.

        The general decoder builds objects, which is not for strangers.
        """
        value = packed[2:] if packed.startswith(b"\xc4") else packed[3:]
        if self._pack(value) != packed:
            raise RemoteProtocolError("the value is not a byte string")
        return value


def _make_key(swarm_id: bytes, name: str) -> str:
    text = f"shoal directory 2\0{swarm_id.hex()}\0{name}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """The record under a key and one of its sub-keys; the value as the DHT packs it."""

    subkey: str
    value: bytes
    expires_at: float

    @cached_property
    def digest(self) -> bytes:
        """A short name for exactly this entry."""
        return hashlib.sha256(self.encode()).digest()[:_DIGEST_BYTES]

    def encode(self) -> bytes:
        """Return the entry as it stands in an answer."""
        subkey = self.subkey.encode()
        return _HEAD.pack(len(subkey), len(self.value), self.expires_at) + subkey + self.value


def encode_question(key: bytes, known: Collection[bytes]) -> bytes:
    """Return the question for everything under a digested key but what is known, by digests."""
    return key + b"".join(known)


def decode_question(question: bytes) -> tuple[bytes, frozenset[bytes]]:
    """Return the key and the digests of a question; raises RemoteProtocolError."""
    key, digests = question[:KEY_BYTES], question[KEY_BYTES:]
    num_known, rest = divmod(len(digests), _DIGEST_BYTES)
    if len(key) < KEY_BYTES or rest or num_known > MAX_KNOWN:
        raise RemoteProtocolError("the question for records is malformed")
    starts = range(0, len(digests), _DIGEST_BYTES)
    return key, frozenset(digests[start : start + _DIGEST_BYTES] for start in starts)


def encode_answer(entries: Iterable[Entry], known: Collection[bytes]) -> bytes:
    """Return what the asker lacks, as far as one message holds it."""
    parts: list[bytes] = []
    num_bytes = 0
    for entry in entries:
        if entry.digest in known:
            continue
        part = entry.encode()
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            break
        parts.append(part)
    return b"".join(parts)


def may_be_cut(answer: bytes) -> bool:
    """Return whether there may be more than one message held."""
    return len(answer) > MAX_ANSWER_BYTES // 2  # far more than any entry that gates let in


def decode_answer(answer: bytes) -> Sequence[Entry]:
    """Return the entries of an answer; raises RemoteProtocolError."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise RemoteProtocolError("the answer with records is too large")
    entries: list[Entry] = []
    place = 0
    while place < len(answer):
        try:
            num_subkey, num_value, expires_at = _HEAD.unpack_from(answer, place)
            place += _HEAD.size
            subkey = answer[place : place + num_subkey].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"the answer with records is malformed: {error}") from error
        place += num_subkey + num_value
        if place > len(answer):
            raise RemoteProtocolError("the answer with records is cut short")
        if math.isfinite(expires_at):  # a bad one must not hide the others
            entries.append(Entry(subkey, answer[place - num_value : place], expires_at))
    return entries
