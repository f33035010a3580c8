"""Questions about network addresses."""

import asyncio
import errno
import ipaddress
import socket
from dataclasses import dataclass

from ..endpoints import Endpoint
from ..errors import UsageError

_BACKLOG = 128

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Seconds until the first question, between questions, their number; and milliseconds for which
what was sent may stay unconfirmed."""


@dataclass(frozen=True)
class DialBackAnswer:
    """The answer of one peer that was asked to dial an endpoint."""

    is_reached: bool | None
    """Whether it could dial us; None: it had no time to try, or does not know."""
    seen_host: str
    """The address that it sees for the asking machine, and dialled. Empty if it did not say."""

    def denies(self, host: str) -> bool:
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


async def open_listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of a host, and do not block.

    Raises UsageError when the port is in use or the host not ours.
    """
    opened: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            # Port 0 is chosen once for all addresses of a host.
            chosen = opened[0].getsockname()[1] if opened else port
            where = (address[0], chosen, *address[2:])
            opened.append(socket.create_server(where, family=family, backlog=_BACKLOG))
            opened[-1].setblocking(False)
    except OSError as error:
        for listening in opened:
            listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} on {host} is in use; choose another one") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{host} is not an address of this machine; listen on 0.0.0.0, and give the "
                "address that others dial with --announce-host"
            ) from error
        named = Endpoint(host, port) if port else host
        reason, _, _ = str(error.strerror or error).partition(" (while")  # names it once more
        raise UsageError(f"cannot listen on {named}: {reason}") from error
    return opened


async def check_can_listen(host: str, port: int) -> None:
    """Raise UsageError when a port is in use or a host not ours."""
    for listening in await open_listening(host, port):
        listening.close()


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
