"""The interface to the replicated store that knows which peer serves what."""

from collections.abc import Sequence
from typing import Protocol

from ..ids import ModelId
from ..records.announcements import Announcement
from ..records.swarm_records import SwarmRecords

KNOWN_PERIODS = 10
"""Announcement periods for which a peer may go by what others tell before it reads again."""


class Directory(Protocol):
    """Publishes our announcements and finds those of others.

    Every result is an expiring hint, and already checked: signed by the peer that it describes,
    within limits, not expired, the newest of each peer. All implementations pass the same
    conformance tests.
    """

    @property
    def records(self) -> SwarmRecords:
        """What is known here, also while nobody can be reached."""
        ...

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

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        """Return the valid announcements for a model, in any order; empty when there are none.

        A directory whose members tell each other what they know may answer from that while it was
        read `max_age_seconds` ago. Raises DirectoryError when it cannot be reached.
        """
        ...

    async def list_models(self) -> list[ModelId]:
        """Return the models that peers of the swarm announce, in any order.

        Complete in a small swarm, and what was found in a large one. Peers that know no such
        question tell nothing. Raises DirectoryError when the directory cannot be reached.
        """
        ...

    async def close(self) -> None:
        """Leave the directory and end every process and task behind it; safe to call twice.

        Announcements stay until they expire.
        """
        ...
