"""The interface to the replicated store that knows which peer serves what."""

from collections.abc import Sequence
from typing import Protocol

from ..ids import ModelId
from ..records.announcements import Announcement, KnownRecord


class Directory(Protocol):
    """Publishes our announcements and finds those of others.

    Every result is an expiring hint, and already checked: signed by the peer that it describes,
    within limits, not expired, the newest of each peer. All implementations pass the same
    conformance tests.
    """

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses that newcomers can pass as `initial_peers` to join through this process.

        Empty if no newcomer can join through it.
        """
        ...

    async def announce(self, record: bytes) -> None:
        """Publish a record of `sign_announcement` until it expires.

        It replaces the peer's previous one for the same model if both its sequence and its
        `expires_at` are higher. Raises LocalProtocolError if the record is not valid now,
        DirectoryError if no node stored it: all were unreachable, or have a newer one. May raise
        that for the newest as well if it was announced before; it is found as before then.
        """
        ...

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """Return the valid announcements for a model, in any order; empty when there are none.

        Raises DirectoryError when the directory cannot be reached.
        """
        ...

    def list_records(self, model_id: ModelId) -> list[KnownRecord]:
        """Return the valid announcements that are known here, also while nobody can be reached.

        Each comes with the value that other members of the swarm pass to `take_record`.
        """
        ...

    def list_hints(self, model_id: ModelId) -> list[Announcement]:
        """Return announcements that have expired within a day, the newest first.

        They tell whom to dial, and nothing else: never route to them, count them or hand them on.
        """
        ...

    def take_record(self, model_id: ModelId, value: bytes) -> Announcement:
        """Remember an announcement that another member knew (see `list_records`), and return it.

        Raises RemoteProtocolError if it is not valid, of another model or swarm, or older than what
        is known.
        """
        ...

    async def close(self) -> None:
        """Leave the directory and end every process and task behind it; safe to call twice.

        Announcements stay until they expire.
        """
        ...
