"""The seam to the replicated store that answers "who serves what"."""

from collections.abc import Sequence
from typing import Protocol

from ..announcements import Announcement
from ..ids import ModelId


class Directory(Protocol):
    """Publishes our announcements and finds those of others.

    What comes back is a hint with an expiry, already checked: signed by the peer it speaks of,
    within limits, not expired, the newest of each peer.
    """

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses that newcomers can pass as `initial_peers` to join through this process."""
        ...

    async def announce(self, announcement: Announcement, signature: bytes) -> None:
        """Publish an announcement until it expires; replaces an older one of the same peer.

        Raises DirectoryError when no replica took it.
        """
        ...

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """Return the valid announcements for a model, in any order; empty when there are none.

        Raises DirectoryError when the directory cannot be reached.
        """
        ...

    async def close(self) -> None:
        """Leave the directory and end every process and task behind it."""
        ...
