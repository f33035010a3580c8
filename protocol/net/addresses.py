"""Questions about network addresses."""

import asyncio
import errno
import ipaddress
import socket
from urllib.parse import unquote

from ..endpoints import Endpoint
from ..errors import UsageError


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host cannot leave this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_in(grpc_peer: str) -> str | None:
    """Return the host in what gRPC calls the other end of a call; None when it names none.

    >>> host_in("ipv4:192.0.2.7:50000"), host_in("ipv6:%5B2001:db8::1%5D:50000")
    ('192.0.2.7', '2001:db8::1')
    >>> host_in("unix:")
    """
    kind, _, address = unquote(grpc_peer).partition(":")
    host, colon, _ = address.rpartition(":")
    return host.strip("[]") if kind in ("ipv4", "ipv6") and colon else None


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
        raise UsageError(f"cannot listen on {Endpoint(host, port)}: {error}") from error
