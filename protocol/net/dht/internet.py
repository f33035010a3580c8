"""The network between machines: TCP under TLS, libp2p through relays, and the DHT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...endpoints import Endpoint, find_local_network, is_loopback
from ...identity import Identity
from ...membership.join_code import fits_code, make_codes
from ...membership.membership import Membership, begin_public
from ..addresses import EVERYWHERE, check_can_be_dialled, is_address, list_own_hosts
from ..clock import Clock
from ..directory import Directory
from ..libp2p.multiaddrs import replace_hosts, split_multiaddr
from ..network import Addresses, Presence
from ..tcp.dial_rules import DialRules
from ..transport import ChoosingTransport, Listener, Stream, StreamServer, Transport
from .known_addresses import AddressFolder, KnownAddresses

if TYPE_CHECKING:
    from ..relays.port_mapping import PortMapping
    from .hivemind_directory import HivemindDirectory


_NOWHERE = ["127.0.0.1"]
"""Where a machine is dialled that is in no network."""

_MOST_OWN, _MOST_OTHERS = 2, 2
"""How many of a peer's addresses its code names, for the internet and its own network, and how many
other peers."""

_LOOKS_PER_QUESTION = 20
"""How often others are asked at which address of a router they see us: in ten minutes once."""


@dataclass(frozen=True)
class Listening:
    """The addresses at which a peer accepts connections."""

    host: str = "127.0.0.1"
    """0.0.0.0 or :: for every address of this machine, without loopback those that others dial."""
    port: int = 0
    """Port for streams; 0: any free one."""
    directory_port: int = 0
    """Port of the directory, and of streams through relays; 0: any free one."""
    announce_host: str | None = None
    """Host that others dial first; None: the one at which they reach us. Then those of `host`."""
    is_relay: bool = False
    """Whether to carry streams to peers that cannot be dialled."""
    maps_ports: bool = False
    """Whether to ask the router, by UPnP, to forward both ports."""

    def __post_init__(self) -> None:
        check_can_be_dialled(self.announce_host or "")

    def list_hosts(self) -> list[str]:
        """Return the hosts that others may dial; loopback where this machine is in no network."""
        hosts = list_own_hosts(self.host)
        if self.announce_host:
            # Some routers do not lead back from their own network.
            hosts = [self.announce_host, *(host for host in hosts if not is_loopback(host))]
        return list(dict.fromkeys(hosts)) or list(_NOWHERE)


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
    note_stranger: Callable[[str, bool], None] = lambda host, is_local: None
    """Told of the first stream from another machine of a local network, and from elsewhere."""

    async def connect(self, rules: DialRules | None = None) -> tuple[Transport, Directory]:
        """See Network.connect; with `rules`, whoever is announced is dialled by them."""
        from ..tcp.tcp_transport import TcpTransport
        from .hivemind_directory import HivemindDirectory

        directory = await HivemindDirectory.join(
            self.initial_peers,
            identity=None,
            clock=self.clock,
            client_mode=True,
            membership=self.membership,
            rules=rules,
            known=self.folder.find(self.membership, self.initial_peers),
        )
        direct = TcpTransport(membership=directory.membership, rules=rules)
        return ChoosingTransport(direct, directory.make_transport(rules)), directory

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        from ..tcp.tcp_transport import TcpTransport
        from .hivemind_directory import HivemindDirectory

        where, hosts = self.listening, self.listening.list_hosts()
        async with AsyncExitStack() as stack:
            rules = DialRules(self.clock, hosts)
            transport = TcpTransport.of_peer(identity, self.membership, rules)
            stack.push_async_callback(transport.close)
            listeners: list[Listener] = [
                await transport.listen(where.host, where.port, self._watch(serve))
            ]
            listening = listeners[0].endpoint
            mapping = None
            if where.maps_ports:
                from ..relays.port_mapping import open_mapping

                mapping = await stack.enter_async_context(open_mapping())
                await mapping.add(listening.port)
                hosts = [mapping.host, *hosts]
            endpoints = [replace(listening, host=host) for host in hosts]
            directory = await HivemindDirectory.join(
                self.initial_peers,
                identity=identity,
                listen_host=where.host,
                port=where.directory_port,
                clock=self.clock,
                membership=self.membership,
                endpoints=endpoints,
                is_relay=where.is_relay,
                rules=rules,
                known=self._find_known(identity),
            )
            stack.push_async_callback(directory.close)
            if directory.relays:
                behind = directory.make_transport()
                stack.push_async_callback(behind.close)
                listeners.append(await behind.listen(where.host, where.directory_port, serve))
            _, port = split_multiaddr(directory.addresses[0])  # that of p2pd
            if mapping is not None:
                await mapping.add(port)
            own = _OwnAddresses(self, directory, rules, mapping, listening, port)
            return Presence(
                identity,
                transport,
                directory,
                listeners,
                own.describe(),
                stack.pop_all(),
                relays=directory.relays,
                directory_port=0 if directory.relays else port,
                find_relays=directory.find_relays,
                find_addresses=own.find,
            )

    def _find_known(self, identity: Identity) -> KnownAddresses | None:
        """Return what is kept of the swarm; of one that begins here, where others can join it."""
        membership = self.membership
        if not self.initial_peers and not is_loopback(self.listening.host):
            membership = membership or begin_public(identity.peer_id)
        return self.folder.find(membership, self.initial_peers)

    def _watch(self, serve: StreamServer) -> StreamServer:
        """Return what serves streams, and tells of the first ones from other machines."""
        told: set[bool] = set()

        async def serve_watched(stream: Stream) -> None:
            host = stream.remote_host
            if host and not is_loopback(host):
                is_local = find_local_network(host) is not None
                if is_local not in told and host not in list_own_hosts(self.listening.host):
                    told.add(is_local)
                    self.note_stranger(host, is_local)
            await serve(stream)

        return serve_watched


class _OwnAddresses:
    """Where others reach one peer that serves, at its start and when that may have changed."""

    def __init__(
        self,
        network: InternetNetwork,
        directory: HivemindDirectory,
        rules: DialRules,
        mapping: PortMapping | None,
        listening: Endpoint,
        directory_port: int,
    ) -> None:
        self._network = network
        self._directory = directory
        self._rules = rules
        self._mapping = mapping
        self._listening = listening
        self._directory_port = directory_port
        self._hosts = network.listening.list_hosts()
        self._num_looks_left = _LOOKS_PER_QUESTION
        self._others: list[str] = []

    async def find(self) -> Addresses:
        """Look whether this machine has other addresses, and tell its directory.

        Without any it keeps those of before: it may be back in the same network soon. Those that it
        joined through are asked again after a change, and now and then where a router forwards its
        port, whose address changes as well.
        """
        directory, where = self._directory, self._network.listening
        hosts = where.list_hosts()
        if hosts != self._hosts and hosts != _NOWHERE:
            self._hosts, self._num_looks_left = hosts, 0
            if self._mapping is not None:
                await self._mapping.renew()
        own_hosts = [*([self._mapping.host] if self._mapping else []), *self._hosts]
        if own_hosts != directory.own_hosts:
            directory.move(own_hosts)
        if directory.hosts[0] not in own_hosts:  # a router forwards our port
            self._num_looks_left -= 1
        if self._num_looks_left <= 0 and await directory.renew_reach():
            self._num_looks_left = _LOOKS_PER_QUESTION
        living = [*filter(fits_code, directory.list_others())]
        # Those that were named before stay, so that a code is seldom a new one.
        named = [other for other in self._others or directory.joined_through if other in living]
        self._others = list(dict.fromkeys([*named, *living]))[:_MOST_OTHERS]
        return self.describe()

    def describe(self) -> Addresses:
        """Return where others reach the peer now."""
        directory = self._directory
        announced = self._hosts if self._network.listening.announce_host else directory.hosts
        endpoints = [replace(self._listening, host=host) for host in announced]
        self._rules.move([*directory.own_hosts, *announced])
        facts = self._describe_for_people(endpoints)
        return Addresses(endpoints, facts, self._directory_port if directory.is_relay else 0)

    def _describe_for_people(self, endpoints: Sequence[Endpoint]) -> Mapping[str, object]:
        """Return from where others reach the peer, and the codes that it may hand to others.

        A code outlives the peer: it names others that are there, or that the peer joined through.
        """
        directory, network = self._directory, self._network
        addresses, is_told = directory.addresses, network.listening.announce_host
        dialled = replace_hosts(addresses, self._hosts if is_told else [])
        is_local = all(is_loopback(endpoint.host) for endpoint in endpoints)
        facts: dict[str, object] = {
            "addresses": list(addresses),
            "dialled": dialled,
            "reach": "machine" if is_local else directory.scope,
            "listens_everywhere": network.listening.host in EVERYWHERE,
            "has_public_host": any(_is_public(endpoint.host) for endpoint in endpoints),
            "endpoints": [str(endpoint) for endpoint in endpoints],
            "relays": [str(relay) for relay in directory.relays],
            "directory_port": self._directory_port,
            "is_relay": directory.is_relay,
        }
        others = ([] if is_local else self._others) or directory.joined_through
        own = [] if directory.relays else dialled[:_MOST_OWN]
        facts["join_codes"] = make_codes(directory.membership, [*own, *others])
        return facts


def _is_public(host: str) -> bool:
    """Return whether a host is no address of a local network; names may be anything."""
    return not is_address(host) or find_local_network(host) is None
