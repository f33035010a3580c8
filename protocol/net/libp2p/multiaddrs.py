"""Addresses of the directory as libp2p writes them, `/ip4/HOST/tcp/PORT/p2p/PEER_ID`."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...endpoints import is_loopback
from ...errors import NobodyAnswersError, RemoteProtocolError, UsageError
from ...identity import peer_id_bytes, public_key_of
from ...ids import JOIN_CODE_PREFIX, PeerId

_HOST_PARTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
_PORT_PARTS = frozenset({"tcp", "udp"})
_PARTS_WITH_VALUE = _HOST_PARTS | _PORT_PARTS | {"p2p"}
_PARTS_WITHOUT_VALUE = frozenset({"p2p-circuit", "quic", "quic-v1", "tls", "ws", "wss"})
# Code of each part in the binary form (multiformats/multicodec, table.csv), as a varint.
_CODES = {
    "ip4": b"\x04",
    "tcp": b"\x06",
    "ip6": b"\x29",
    "dns": b"\x35",
    "dns4": b"\x36",
    "dns6": b"\x37",
    "p2p-circuit": b"\xa2\x02",
    "p2p": b"\xa5\x03",
}
# No comma above all: p2pd takes its initial peers as a list with commas.
_UNEXPECTED = re.compile(r"[^0-9A-Za-z._:/-]")

_PROBE_SECONDS = 1.5
"""How long an initial peer may take to accept a connection before it counts as gone."""


@dataclass(frozen=True)
class PeerAddress:
    """The address at which one peer's directory node can be dialled.

    `tcp_port` is None when it takes more than a TCP connection to find out whether it is there.
    """

    text: str
    host: str
    tcp_port: int | None
    peer_id: PeerId

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Read a multiaddr that ends in a peer id; raises UsageError for anything else.

        >>> id = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        >>> address = PeerAddress.parse("/ip4/127.0.0.1/tcp/4001/p2p/" + id)
        >>> address.host, address.tcp_port, address.peer_id == id, address.is_loopback
        ('127.0.0.1', 4001, True, True)
        """
        if text.startswith(JOIN_CODE_PREFIX):
            raise UsageError("that is a join code, not an address; pass it with --join (join=)")
        try:
            return cls._parse(text)
        except (ValueError, RemoteProtocolError) as error:
            raise UsageError(
                f"{text!r} is not the address of a peer, /ip4/HOST/tcp/PORT/p2p/PEER_ID: {error}"
            ) from error

    @classmethod
    def _parse(cls, text: str) -> PeerAddress:
        if not text.startswith("/"):
            raise ValueError("it does not begin with /")
        if unexpected := _UNEXPECTED.search(text):
            raise ValueError(f"an address cannot contain {unexpected[0]!r}")
        words = text.split("/")[1:]
        parts: list[tuple[str, str]] = []
        while words:
            name = words.pop(0)
            value = words.pop(0) if name in _PARTS_WITH_VALUE and words else ""
            _check_part(name, value)
            parts.append((name, value))
        names = [name for name, _ in parts]
        if len(parts) < 3 or names[0] not in _HOST_PARTS or names[1] not in _PORT_PARTS:
            raise ValueError("it needs a host, a port and a peer id")
        if names[-1] != "p2p":
            raise ValueError("it needs a peer id at its end")
        host, port, peer_id = parts[0][1], parts[1][1], parts[-1][1]
        return cls(text, host, int(port) if names[1:] == ["tcp", "p2p"] else None, PeerId(peer_id))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant."""
        return is_loopback(self.host)


def _check_part(name: str, value: str) -> None:
    """Raise ValueError or RemoteProtocolError unless a multiaddr may have this part."""
    if name in _PORT_PARTS and not (value.isdecimal() and 0 < int(value) < 2**16):
        raise ValueError(f"{value!r} is not a port in 1..65535")
    elif name in ("ip4", "ip6") and f"ip{ipaddress.ip_address(value).version}" != name:
        raise ValueError(f"{value} is of the other family")
    elif name == "p2p":
        public_key_of(value)
    elif name in _PARTS_WITH_VALUE and not value:
        raise ValueError(f"{name} needs a value")
    elif name not in _PARTS_WITH_VALUE | _PARTS_WITHOUT_VALUE:
        raise ValueError(f"{name!r} is unknown")


def split_multiaddr(text: str) -> tuple[str, int]:
    """Return the host and port that a multiaddr begins with; nothing and 0 where it has none.

    >>> split_multiaddr("/ip4/192.0.2.7/tcp/4001/p2p/12D3Koo"), split_multiaddr("/p2p/12D3Koo")
    (('192.0.2.7', 4001), ('', 0))
    """
    words = text.split("/")[1:]
    if len(words) < 4 or words[0] not in _HOST_PARTS or words[2] not in _PORT_PARTS:
        return "", 0
    return words[1], int(words[3])


def pack_multiaddr(text: str) -> bytes:
    """Return the bytes of an address with TCP and maybe a relay; raises ValueError for others.

    >>> pack_multiaddr("/ip4/192.0.2.7/tcp/4001").hex()
    '04c0000207060fa1'
    """
    words, packed = text.split("/")[1:], b""
    while words:
        name = words.pop(0)
        if name not in _CODES:
            raise ValueError(f"{name!r} is unknown")
        packed += _CODES[name] + (b"" if name == "p2p-circuit" else _pack_value(name, words.pop(0)))
    return packed


def _pack_value(name: str, value: str) -> bytes:
    if name == "tcp":
        return int(value).to_bytes(2, "big")
    if name in ("ip4", "ip6"):
        return ipaddress.ip_address(value).packed
    data = peer_id_bytes(value) if name == "p2p" else value.encode()
    if len(data) > 127:  # then the length would take more than one byte
        raise ValueError(f"{name} has {len(data)} bytes")
    return bytes([len(data)]) + data


def make_listen_multiaddr(host: str, port: int) -> str:
    """Return where to listen; raises UsageError when the host is not an IP address.

    >>> make_listen_multiaddr("::1", 0)
    '/ip6/::1/tcp/0'
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise UsageError(f"cannot listen on {host!r}: it is not an IP address") from error
    return f"/ip{version}/{host}/tcp/{port}"


def replace_hosts(addresses: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return the addresses that others dial where it is known by which hosts they reach us.

    >>> replace_hosts(["/ip4/0.0.0.0/tcp/4001/p2p/12D3KooW…"], ["peer.example.org"])
    ['/dns/peer.example.org/tcp/4001/p2p/12D3KooW…']
    >>> replace_hosts(["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW…"], [])
    ['/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW…']
    """
    if not hosts:
        return list(addresses)
    rest = sorted({address.split("/", 3)[3] for address in addresses})  # without form and host
    return [f"/{_name_form(host)}/{host}/{end}" for host in hosts for end in rest]


def _name_form(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


async def find_listening(addresses: Sequence[PeerAddress]) -> list[PeerAddress]:
    """Return the addresses where someone accepts a connection, or that cannot be tried.

    Raises NobodyAnswersError that names all of them when there are some and none is left.
    """
    are_listening = await asyncio.gather(*(_is_listening(a) for a in addresses))
    listening = [a for a, is_up in zip(addresses, are_listening, strict=True) if is_up]
    if addresses and not listening:
        texts = ", ".join(address.text for address in addresses)
        is_local = all(address.is_loopback for address in addresses)
        advice = "; these addresses lead to the machine that printed them, from no other one"
        raise NobodyAnswersError(
            f"no initial peer can be reached: {texts}; check that one of them still runs and that "
            "its address is the one it printed last (shoal doctor looks closer)"
            f"{advice if is_local else ''}"
        )
    return listening


async def _is_listening(address: PeerAddress) -> bool:
    if address.tcp_port is None:
        return True
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.tcp_port)
    except (OSError, TimeoutError, UnicodeError):  # the last one for a name that cannot be
        return False
    writer.close()
    return True
