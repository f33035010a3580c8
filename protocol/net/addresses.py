"""Questions about network addresses."""

import asyncio
import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from ..endpoints import Endpoint
from ..errors import UsageError

_BACKLOG = 128

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Seconds until the first question, between questions, their number; and milliseconds for which
what was sent may stay unconfirmed."""


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host cannot leave this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Reach:
    """The answer of one peer that was asked to dial an endpoint."""

    is_reached: bool | None
    """Whether it could dial us; None: it had no time to try, or does not know."""
    seen_host: str
    """The address that it sees for the asking machine, and dialled. Empty if it did not say."""

    def says_no(self, host: str) -> bool:
        """Return whether it means that others cannot dial this host.

        Reached at another one, we are behind a NAT that lets the port through, and would announce
        an address that means nothing outside. A public one the other may know from within, by its
        own.
        """
        if self.is_reached and self.seen_host != host:
            return not _is_for_everybody(host)
        return self.is_reached is False


def _is_for_everybody(host: str) -> bool:
    """Return whether a host means the same everywhere: a name, or a public address."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


async def resolve_all(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the addresses to listen on for a host, each once."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def open_listening(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Return a listening socket that does not block. Raises OSError."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AddressFamily.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def set_keepalive(connected: socket.socket) -> None:
    """Have the system notice within half a minute that the machine at the other end is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system can be told
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_can_be_dialled(host: str) -> None:
    """Raise UsageError for a host to announce that means every address of this machine."""
    if host in ("0.0.0.0", "::"):
        raise UsageError(
            f"others cannot dial {host}: give the address that they should use with --announce-host"
        )


async def check_can_bind(host: str, port: int) -> None:
    """Raise UsageError when a port is in use or a host not ours."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} on {host} is in use; choose another one") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{host} is not an address of this machine; listen on 0.0.0.0, and give the "
                "address that others dial with --announce-host"
            ) from error
        where = Endpoint(host, port) if port else host
        raise UsageError(f"cannot listen on {where}: {error.strerror or error}") from error
