"""What a node of a replicated directory lets in: only what a peer signed for that very place."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from .. import limits
from ..announcement_book import AnnouncementBook
from ..announcements import Announcement
from ..errors import RemoteProtocolError
from ..ids import ModelId, PeerId
from .clock import Clock

_logger = logging.getLogger(__name__)

_MAX_RECORDS_PER_KEY = 4 * 2**20 // (limits.MAX_ANNOUNCEMENT_BYTES + 256)
"""How many surely fit into 4 MiB with what belongs to them. The DHT sends all that stand under a
key in one message and can send no larger one: who stored more could not be asked any more."""


class RecordGate:
    """Checks entries of the DHT and remembers what passed. Owned by one node.

    An entry stands under (key of swarm and model, peer id) with the expiry of its announcement,
    and names the swarm itself, so that swarms with different names may share one DHT. Junk,
    foreign writers and replays of older records are refused.
    """

    def __init__(
        self,
        swarm: str,
        clock: Clock,
        digest_key: Callable[[str], bytes],
        pack: Callable[[str | bytes], bytes],
        max_records: int = _MAX_RECORDS_PER_KEY,
        secret: bytes | None = None,
    ) -> None:
        """Make a gate for a DHT that digests keys and packs subkeys and values like this.

        `secret` decides the lottery of a full book; a fresh one by default.
        """
        self._swarm = swarm
        self._clock = clock
        self._digest_key = digest_key
        self._pack = pack
        self._book = AnnouncementBook(max_records, 10 * max_records, secret)

    def when_displaced(self, forget: Callable[[str, PeerId], None]) -> None:
        """Have `forget` called with the key and the peer of each record that had to go.

        It goes for another one, and must not stay stored either.
        """
        self._book.on_displaced = forget

    def read(self, record: bytes) -> Announcement:
        """Return the announcement in a record that holds now; raises RemoteProtocolError."""
        return self._book.read(record, self._clock.wall())

    def add_own(self, model_id: ModelId, record: bytes) -> None:
        """Remember a record of ours; raises RemoteProtocolError when a newer one is known."""
        self._book.add_own(self.key_of(model_id), record, self._clock.wall())

    def watch(self, model_id: ModelId) -> str:
        """Return the key of a model in our swarm, and have room for what is found there."""
        key = self.key_of(model_id)
        self._book.reserve(key)
        return key

    def list_current(self, model_id: ModelId) -> list[Announcement]:
        """Return what passed, is the newest of its peer and holds now."""
        return self._book.list_current(self.key_of(model_id), self._clock.wall())

    def key_of(self, model_id: ModelId) -> str:
        """Return the key of a model in our swarm."""
        return _make_key(self._swarm, model_id)

    def wrap(self, record: bytes) -> bytes:
        """Return the value that stands in the DHT for a record."""
        return self._swarm.encode() + b"\0" + record

    def accept(
        self, key_digest: bytes, packed_subkey: bytes, packed_value: bytes, expires_at: float
    ) -> bool:
        """Return whether an entry may stand there, and remember it then. Never raises."""
        try:
            value = self._unpack_bytes(packed_value)
            swarm_bytes, _, record = value.partition(b"\0")
            announcement = self.read(record)
            key = _make_key(swarm_bytes.decode(), announcement.model_id)
            if (
                key_digest == self._digest_key(key)
                and packed_subkey == self._pack(announcement.peer_id)
                and expires_at == announcement.expires_at
            ):
                self._book.add(key, record, self._clock.wall())
                return True
        except (RemoteProtocolError, UnicodeDecodeError) as error:
            _logger.debug("refused a record of the directory: %s", error)
        return False

    def _unpack_bytes(self, packed: bytes) -> bytes:
        """Undo MSGPack for byte strings of 8 or 16 bit length only.

        The general decoder builds objects, which is not for strangers.
        """
        value = packed[2:] if packed.startswith(b"\xc4") else packed[3:]
        if self._pack(value) != packed:
            raise RemoteProtocolError("the value is not a byte string")
        return value


def _make_key(swarm: str, model_id: ModelId) -> str:
    return hashlib.sha256(f"shoal directory 1\0{swarm}\0{model_id}".encode()).hexdigest()
