"""How a client gets into a swarm: the network that it uses, and the peers that its user allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...protocol.errors import DirectoryError, UsageError
from ...protocol.ids import ModelId
from ...protocol.membership.join_code import find_way_in
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.dht.internet import InternetNetwork
from ...protocol.net.directory import Directory
from ...protocol.net.network import Network
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ..routing.swarm import Swarm
from ..settings.config import ClientConfig

Connect = Callable[[ClientConfig], Network]
"""Returns the network over which a client with these settings joins."""


@dataclass(frozen=True)
class SwarmModel:
    """The model whose swarm is joined."""

    model_id: ModelId
    num_blocks: int
    hidden_size: int


@dataclass(frozen=True)
class Joined:
    """A swarm whose directory was read once, and the network that it is read over."""

    swarm: Swarm
    transport: Transport
    directory: Directory

    async def leave(self) -> None:
        """Break all connections."""
        try:
            await self.transport.close()
        finally:
            await self.directory.close()


def find_network(config: ClientConfig) -> Network:
    """Return TCP, with libp2p for relayed peers, and the DHT, joined by code or initial peers."""
    if not config.initial_peers and not config.join:
        raise UsageError(
            "no swarm is given: pass join='shoal:…', the code that `shoal serve --new-swarm` "
            "prints, or initial_peers=[...], addresses that `shoal serve` and `shoal swarm` print"
        )
    membership, addresses = find_way_in(config.join, config.initial_peers)
    return InternetNetwork(SystemClock(), addresses, membership)


async def join_swarm(
    config: ClientConfig, network: Network, clock: Clock, model: SwarmModel
) -> Joined:
    """Join the swarm of a model.

    Raises DirectoryError when no initial peer answers, the second time either.
    """
    try:
        return await _join_once(config, network, clock, model)
    except DirectoryError:
        # A busy machine may have been too slow, above all where many join at once.
        return await _join_once(config, network, clock, model)


async def _join_once(
    config: ClientConfig, network: Network, clock: Clock, model: SwarmModel
) -> Joined:
    transport, directory = await network.connect()
    chosen, rng = choose_peers(directory, config), random.Random(config.seed)
    swarm = Swarm(chosen, model.model_id, model.num_blocks, clock, rng)
    try:
        await swarm.book.refresh()
    except BaseException:
        await directory.close()
        await transport.close()
        raise
    return Joined(swarm, transport, directory)


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
