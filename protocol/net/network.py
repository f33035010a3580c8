"""The seam between a process and its swarm: what brings a transport and a directory.

`dht/internet.py` implements it over TCP, libp2p and the DHT, `memory/memory_network.py` inside one
process. A peer and a client are built in the same way over either.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..endpoints import Endpoint, Relay
from ..identity import Identity
from ..ids import ModelId
from .directory import Directory
from .transport import Listener, StreamServer, Transport


class Presence(Protocol):
    """A peer that has joined: others can reach it, and it can dial them. Its peer closes it."""

    @property
    def identity(self) -> Identity:
        """The key and the id of the peer."""
        ...

    @property
    def transport(self) -> Transport:
        """Dials other peers; closed with the presence."""
        ...

    @property
    def directory(self) -> Directory:
        """The directory, joined under the peer's identity; closed with the presence."""
        ...

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners; close them before the service of their streams ends."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that others dial, if the peer can be dialled."""
        ...

    @property
    def relays(self) -> Sequence[Relay]:
        """The relays that carry streams to the peer, since nobody can dial it; none if others can.

        Empty at first means empty for good.
        """
        ...

    @property
    def relay_port(self) -> int:
        """The port at which the peer is a relay of others; 0: it is none."""
        ...

    async def renew_relays(self, model_id: ModelId) -> bool:
        """Replace relays that are gone; return whether they changed. Does nothing without relays.

        Raises DirectoryError when no peer can be asked to be one.
        """
        ...

    def describe(self) -> Mapping[str, object]:
        """Return how others can join through this peer, for people. Values are plain JSON types."""
        ...

    async def close(self) -> None:
        """Leave the directory and break the remaining connections; safe to call twice."""
        ...


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
