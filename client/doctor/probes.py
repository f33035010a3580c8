"""The access of `shoal doctor` to network and disk: it reads a model, dials, joins, asks peers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...protocol.endpoints import Endpoint
from ...protocol.ids import ModelId
from ...protocol.membership.membership import Membership
from ...protocol.net.addresses import DialBackAnswer
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.directory import Directory
from ...protocol.net.transport import Transport
from .reach_check import ListenAddress

LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"
"""The greeting of a libp2p connection (multistream-select: length, text, newline)."""


@dataclass(frozen=True)
class ModelFacts:
    """The swarm to look for: its model."""

    name: str
    model_id: ModelId
    num_blocks: int

    @classmethod
    def read(cls, model: str, name: str) -> "ModelFacts":
        """Read a model directory or Hub id; raises ModelError when it cannot be used.

        `name` is what people call it.
        """
        from ..model.local_layers import open_checkpoint

        _, config = open_checkpoint(model, revision=None)
        return cls(name, config.dht_prefix, config.num_hidden_layers)


class JoinedSwarm(NamedTuple):
    """A transport and a directory for a client; see Network.connect."""

    transport: Transport
    directory: Directory


@dataclass(frozen=True)
class Probes:
    """Everything that touches the network or the clock."""

    clock: Clock
    dial: Callable[[str, int], Awaitable[None]]
    """Open and close a TCP connection; raises OSError."""
    greet_libp2p: Callable[[str, int], Awaitable[bytes]]
    """Greet over TCP as libp2p does and return the answer; raises OSError."""
    join: Callable[[Sequence[str]], Awaitable[JoinedSwarm]]
    """Join through these addresses as a client."""
    check_certificate: Callable[[Endpoint], Awaitable[object]]
    """Raise as `check_certificate` does."""
    reach: Callable[[Sequence[str], ListenAddress], Awaitable[Sequence[DialBackAnswer]]]
    """Ask others, through these addresses, to dial this machine at an address."""


def make_network_probes(membership: Membership | None = None) -> Probes:
    """Return the probes over TCP, TLS and the DHT, which take seconds to import.

    Without a membership they join open swarms only.
    """
    from ...protocol.net.dht.internet import InternetNetwork
    from ...protocol.net.relays.reachability import probe
    from ...protocol.net.tcp.tcp_transport import TcpTransport
    from ...protocol.net.tcp.tls import check_certificate

    clock = SystemClock()

    async def join(addresses: Sequence[str]) -> JoinedSwarm:
        return JoinedSwarm(*await InternetNetwork(clock, addresses, membership).connect())

    async def reach(addresses: Sequence[str], address: ListenAddress) -> Sequence[DialBackAnswer]:
        return await probe(
            TcpTransport(), addresses, address.listen_host, address.port, address.announced_host
        )

    return Probes(clock, _dial, _greet_libp2p, join, check_certificate, reach)


async def _dial(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def _greet_libp2p(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(LIBP2P_GREETING)
        return await reader.read(len(LIBP2P_GREETING))
    finally:
        writer.close()
