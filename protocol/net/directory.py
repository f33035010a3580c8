"""The seam to the replicated store that answers "who serves what"."""

from collections.abc import Sequence
from typing import Protocol

from ..ids import ModelId
from ..records.announcements import Announcement


class Directory(Protocol):
    """Publishes our announcements and finds those of others.

    What comes back is a hint with an expiry, already checked: signed by the peer it speaks of,
    within limits, not expired, the newest of each peer. All implementations pass the same
    conformance tests.
    """

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses that newcomers can pass as `initial_peers` to join through this process.

        Empty when nobody can join through it.
        """
        ...

    async def announce(self, record: bytes) -> None:
        """Publish a record of `sign_announcement` until it expires.

        It replaces the peer's previous one for the same model if both its sequence and its
        `expires_at` are higher. Raises LocalProtocolError when the record does not hold now,
        DirectoryError when nobody took it: unreachable, or a newer one is already there.
        """
        ...

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """Return the valid announcements for a model, in any order; empty when there are none.

        Raises DirectoryError when the directory cannot be reached.
        """
        ...

    async def close(self) -> None:
        """Leave the directory and end every process and task behind it; safe to call twice.

        What was announced stays until it expires.
        """
        ...
