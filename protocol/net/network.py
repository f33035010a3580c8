"""The seam between a process and its swarm: what brings a transport and a directory.

`dht/internet.py` implements it over TCP, libp2p and the DHT, `memory/memory_network.py` inside one
process. A peer and a client are built in the same way over either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from ..endpoints import Endpoint, Relay
from ..errors import NobodyAnswersError
from ..identity import Identity
from ..ids import ModelId
from .clock import Clock
from .directory import Directory
from .retry import Backoff, Retry
from .transport import Listener, StreamServer, Transport

_PAUSES = Backoff(2.0, 60.0)
"""Between attempts to join: a machine may start before its network, or before its swarm."""


@dataclass(frozen=True)
class Addresses:
    """Where others reach a peer at one time."""

    endpoints: Sequence[Endpoint]
    """The endpoints that others dial, best first, if the peer can be dialled."""
    facts: Mapping[str, object]
    """How others can join through this peer, for people. Values are plain JSON types."""
    relay_port: int = 0
    """The port at which the peer is a relay of others; 0: it is none."""


@dataclass
class Presence:
    """A peer that has joined: others can reach it, and it can dial them. Its peer closes it."""

    identity: Identity
    transport: Transport
    """Dials other peers; closed with the presence."""
    directory: Directory
    """The directory, joined under the peer's identity; closed with the presence."""
    listeners: Sequence[Listener]
    """The listeners; close them before the service of their streams ends."""
    addresses: Addresses
    opened: AsyncExitStack
    """Closes what was opened, the last first."""
    relays: Sequence[Relay] = ()
    """The relays that carry streams to the peer, since nobody can dial it; none if others can.

    Empty at first means empty for good.
    """
    directory_port: int = 0
    """The port at which others on the internet can join through the peer; 0: none."""
    find_relays: Callable[[ModelId], Awaitable[Sequence[Relay]]] | None = None
    """Replaces relays that are gone, also by peers of a model; returns those that carry now."""
    find_addresses: Callable[[], Awaitable[Addresses]] | None = None
    """Looks where others reach the peer by now: a machine may change its network."""

    async def renew_relays(self, model_id: ModelId) -> bool:
        """Replace relays that are gone; return whether they changed. Does nothing without relays.

        Raises DirectoryError when no peer can be asked to be one.
        """
        before = self.relays
        if self.find_relays is not None:
            self.relays = await self.find_relays(model_id)
        return self.relays != before

    async def renew_addresses(self) -> bool:
        """Look where others reach us by now; return whether there is something new to announce."""
        before = self.addresses
        if self.find_addresses is not None:
            self.addresses = await self.find_addresses()
        return replace(self.addresses, facts=before.facts) != before

    async def close(self) -> None:
        """Leave the directory and break the remaining connections; safe to call twice."""
        await self.opened.aclose()


class Network(Protocol):
    """The access of one process, a peer or a client, to one swarm; holds nothing open."""

    async def connect(self) -> tuple[Transport, Directory]:
        """Join without serving: return a client's transport and directory.

        The caller closes both, the transport first. Raises UsageError for an address or a
        membership that does not fit and DirectoryError when no peer answers.
        """
        ...

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        """Accept streams, which `serve` gets, and join the directory under an identity.

        Raises UsageError for an address that is malformed, in use or not ours, DirectoryError when
        the swarm cannot be joined; then nothing stays open.
        """
        ...


async def join_patiently(
    network: Network,
    identity: Identity,
    serve: StreamServer,
    clock: Clock,
    note_waiting: Callable[[str], None],
) -> Presence:
    """Serve when somebody in the swarm answers; tell once, and why, that nobody does yet.

    Raises what `Network.serve` does for other reasons.
    """
    attempts = Retry(_PAUSES, clock)
    while True:
        try:
            return await network.serve(identity, serve)
        except NobodyAnswersError as error:
            if not attempts.num_failures:
                note_waiting(str(error))
        attempts.note_failure()
        await attempts.pause()
