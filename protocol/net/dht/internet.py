"""The network between machines: TCP under TLS, libp2p through relays, and the DHT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...endpoints import Endpoint, is_loopback
from ...identity import Identity
from ...membership.join_code import make_codes
from ...membership.membership import Membership
from ..addresses import check_can_be_dialled
from ..clock import Clock
from ..directory import Directory
from ..libp2p.multiaddrs import replace_host, split_multiaddr
from ..network import Presence
from ..transport import ChoosingTransport, Listener, StreamServer, Transport
from .known_addresses import AddressFolder

if TYPE_CHECKING:
    from .hivemind_directory import HivemindDirectory


@dataclass(frozen=True)
class Listening:
    """The addresses at which a peer accepts connections."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port for streams; 0: any free one."""
    directory_port: int = 0
    """Port of the directory, and of streams through relays; 0: any free one."""
    announce_host: str | None = None
    """Host that others dial; None: the one of `listen_host`."""
    is_relay: bool = False
    """Whether to carry streams to peers that cannot be dialled."""

    def __post_init__(self) -> None:
        check_can_be_dialled(self.announce_host or self.host)


@dataclass(frozen=True)
class InternetNetwork:
    """The swarm of some initial peers, or a new one that a peer begins. Implements Network.

    Its parts are imported when it is joined: hivemind and TLS take seconds, for which neither
    `--help` nor a client in memory should wait.
    """

    clock: Clock
    initial_peers: Sequence[str] = ()
    """Directory addresses to join through; empty: a peer begins a new swarm."""
    membership: Membership | None = None
    """The swarm to join or begin; None: the public one of the initial peers, or a new one."""
    listening: Listening = field(default_factory=Listening)
    folder: AddressFolder = field(default_factory=AddressFolder)
    """Where addresses of the swarm are kept for the next start."""

    async def connect(self) -> tuple[Transport, Directory]:
        from ..tcp.tcp_transport import TcpTransport
        from .hivemind_directory import HivemindDirectory

        directory = await HivemindDirectory.join(
            self.initial_peers,
            identity=None,
            clock=self.clock,
            client_mode=True,
            membership=self.membership,
            known=self.folder.find(self.membership, self.initial_peers),
        )
        direct = TcpTransport(membership=directory.membership)
        return ChoosingTransport(direct, directory.make_transport()), directory

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        from ..tcp.dial_rules import DialRules
        from ..tcp.tcp_transport import TcpTransport
        from ..tcp.tls import make_tls_identity
        from .hivemind_directory import HivemindDirectory

        where = self.listening
        async with AsyncExitStack() as stack:
            # Peers that know the announcement from before a restart find the same key again.
            tls_identity = make_tls_identity(identity.derive_secret("shoal TLS key"))
            rules = DialRules(self.clock, where.announce_host or where.host)
            transport = TcpTransport(tls_identity, membership=self.membership, rules=rules)
            stack.push_async_callback(transport.close)
            listeners: list[Listener] = [await transport.listen(where.host, where.port, serve)]
            listening = listeners[0].endpoint
            announced = where.announce_host or listening.host
            endpoint = Endpoint(announced, listening.port, listening.fingerprint)
            directory = await HivemindDirectory.join(
                self.initial_peers,
                identity=identity,
                listen_host=where.host,
                port=where.directory_port,
                clock=self.clock,
                membership=self.membership,
                endpoint=endpoint,
                is_relay=where.is_relay,
                known=self.folder.find(self.membership, self.initial_peers),
            )
            stack.push_async_callback(directory.close)
            if directory.relays:
                behind = directory.make_transport()
                stack.push_async_callback(behind.close)
                listeners.append(await behind.listen(where.host, where.directory_port, serve))
            host, port = split_multiaddr(directory.addresses[0])  # that of p2pd
            is_relay = where.is_relay and not is_loopback(host)
            return Presence(
                identity,
                transport,
                directory,
                listeners,
                endpoint,
                opened=stack.pop_all(),
                facts=self._describe(directory),
                relays=directory.relays,
                directory_port=0 if directory.relays else port,
                relay_port=port if is_relay and not directory.relays else 0,
                find_relays=directory.find_relays,
            )

    def _describe(self, directory: HivemindDirectory) -> Mapping[str, object]:
        """Return addresses, and the codes of a swarm that begins here.

        Not those of other swarms: a peer that is started by a program should not log secrets.
        """
        addresses = directory.addresses
        dialled = replace_host(addresses, self.listening.announce_host)
        facts: dict[str, object] = {"addresses": list(addresses), "dialled": dialled}
        if not self.initial_peers:
            facts["join_codes"] = make_codes(directory.membership, dialled)
        return facts
