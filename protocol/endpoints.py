"""Endpoints: addresses at which a peer can be dialled, and the proof that it is the right one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from .ids import PeerId

_HOST = re.compile(r"[0-9A-Za-z_.:%-]{1,253}")  # a name, or an IPv4 or IPv6 address
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")

_LOCAL_NETWORKS = tuple(
    map(
        ip_network,
        (
            "127.0.0.0/8",
            "::1/128",
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "169.254.0.0/16",
            "fc00::/7",
            "fe80::/10",
            "0.0.0.0/8",
            "::/128",
        ),
    )
)
"""Networks whose addresses mean another machine elsewhere."""


@dataclass(frozen=True, order=True, slots=True)
class Endpoint:
    """A host and port, with the SHA-256 fingerprint of the TLS key that must answer there.

    `fingerprint` is 64 lower-case hex digits. Nobody dials an endpoint where it is empty.
    """

    host: str
    port: int
    fingerprint: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def short_name(self) -> str:
        """Where the peer is reached, for a line of a table."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Relay:
    """A peer that carries streams to others which cannot be dialled, and its libp2p host and port.

    >>> str(Relay("192.0.2.1", 4001, PeerId("12D3Koo")))
    '/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo'
    """

    host: str
    port: int
    peer_id: PeerId

    def __str__(self) -> str:
        return f"{_name_address(self.host, self.port)}/p2p/{self.peer_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Libp2pEndpoint(Endpoint):
    """A peer that is dialled through libp2p, which proves its peer id; there is no fingerprint.

    Host and port are those of its relay, or of its own libp2p node where there is no relay.

    >>> relay = Relay("192.0.2.1", 4001, PeerId("12D3Rel"))
    >>> str(Libp2pEndpoint.behind(relay, PeerId("12D3Pee")))
    '/ip4/192.0.2.1/tcp/4001/p2p/12D3Rel/p2p-circuit/p2p/12D3Pee'
    """

    peer_id: PeerId
    relay_id: PeerId | None = None

    @classmethod
    def behind(cls, relay: Relay, peer_id: PeerId) -> Libp2pEndpoint:
        """Return the endpoint of a peer that is reached through a relay."""
        return cls(relay.host, relay.port, peer_id=peer_id, relay_id=relay.peer_id)

    @property
    def address(self) -> str:
        """The address that libp2p dials, without the id of the peer that must answer."""
        address = _name_address(self.host, self.port)
        return f"{address}/p2p/{self.relay_id}/p2p-circuit" if self.relay_id else address

    def __str__(self) -> str:
        return f"{self.address}/p2p/{self.peer_id}"

    @property
    def short_name(self) -> str:
        return f"{Endpoint(self.host, self.port)}{' (relay)' if self.relay_id else ''}"


def _name_address(host: str, port: int) -> str:
    """Write a host and port as libp2p does."""
    if ":" in host:
        return f"/ip6/{host}/tcp/{port}"
    is_ipv4 = host.replace(".", "").isdecimal()
    return f"/{'ip4' if is_ipv4 else 'dns'}/{host}/tcp/{port}"


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host cannot leave this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def find_local_network(host: str) -> IPv4Network | IPv6Network | None:
    """Return the network outside of which an address means nothing; None if it has no such bounds.

    Raises ValueError for a name.

    >>> find_local_network("192.168.1.7"), find_local_network("::ffff:127.0.0.1")
    (IPv4Network('192.168.0.0/16'), IPv4Network('127.0.0.0/8'))
    >>> find_local_network("8.8.8.8")
    """
    address = read_address(host)
    return next((network for network in _LOCAL_NETWORKS if address in network), None)


def read_address(host: str) -> IPv4Address | IPv6Address:
    """Return an address, one of IPv4 also where it is written as IPv6. Raises ValueError."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def check_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that a stranger named; raises ValueError when it cannot be one."""
    if not _HOST.fullmatch(endpoint.host):
        raise ValueError("the host is not a name or an address")
    if not 0 < endpoint.port < 2**16:
        raise ValueError("the port is not in 1..65535")
    if endpoint.fingerprint and not _FINGERPRINT.fullmatch(endpoint.fingerprint):
        raise ValueError("the fingerprint is not 64 lower-case hex digits")
    return endpoint


def is_local_endpoint(endpoint: Endpoint) -> bool:
    """Return whether an endpoint is of use to other machines, but in its own network only.

    >>> hosts = ("192.168.1.7", "8.8.8.8", "127.0.0.1", "0.0.0.0", "peer.example")
    >>> [is_local_endpoint(Endpoint(host, 1)) for host in hosts]
    [True, False, False, False, False]
    """
    try:
        network = find_local_network(endpoint.host)
    except ValueError:
        return False
    if network is None or network.is_loopback:
        return False
    return not network.network_address.is_unspecified  # which leads to this machine as well


def check_local_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that a stranger named for those in its network; raises ValueError."""
    if not is_local_endpoint(check_endpoint(endpoint)):
        raise ValueError("the host is not an address of a local network")
    return endpoint
