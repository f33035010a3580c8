"""Questions about addresses of this machine."""

import asyncio
import errno
import ipaddress
import socket

from ..endpoints import Endpoint
from ..errors import UsageError


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host cannot leave this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
