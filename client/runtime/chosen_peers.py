"""The peers that a client may use at all, where its user has said which."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...protocol.ids import ModelId
from ...protocol.net.directory import Directory
from ...protocol.records.announcements import Announcement
from ..settings.config import ClientConfig


def choose_peers(directory: Directory, config: ClientConfig) -> Directory:
    """Return a directory without the peers that a client is not to use."""
    if config.allowed_servers is None and not config.blocked_servers:
        return directory
    return _ChosenPeers(directory, config.allowed_servers, config.blocked_servers)


class _ChosenPeers:
    """Another directory, of which some peers are not seen. `allowed` None: all."""

    def __init__(
        self, directory: Directory, allowed: Collection[str] | None, blocked: Collection[str]
    ) -> None:
        self._directory = directory
        self._allowed = allowed
        self._blocked = blocked

    @property
    def addresses(self) -> Sequence[str]:
        """See `Directory.addresses`."""
        return self._directory.addresses

    async def announce(self, record: bytes) -> None:
        """See `Directory.announce`."""
        await self._directory.announce(record)

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """See `Directory.lookup`."""
        return [peer for peer in await self._directory.lookup(model_id) if self._may_use(peer)]

    async def close(self) -> None:
        """See `Directory.close`."""
        await self._directory.close()

    def _may_use(self, peer: Announcement) -> bool:
        is_allowed = self._allowed is None or peer.peer_id in self._allowed
        return is_allowed and peer.peer_id not in self._blocked
