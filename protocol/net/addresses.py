"""Questions about network addresses."""

import asyncio
import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Interface, ip_address

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


EVERYWHERE = ("0.0.0.0", "::")
"""To listen there is to listen at every address of this machine, of one family."""

_MOST_OWN_HOSTS = 4

# SIOCGIFFLAGS, SIOCGIFADDR and SIOCGIFNETMASK of Linux
_GET_FLAGS, _GET_ADDRESS, _GET_NETMASK = 0x8913, 0x8915, 0x891B
_IS_UP, _IS_LOOPBACK, _IS_RUNNING = 0x1, 0x8, 0x40
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documents, to which nothing is sent: the system says from where it would go."""


def list_own_hosts(listen_host: str) -> list[str]:
    """Return where others may dial somebody who listens at a host: that one, unless it is any.

    Then these are the addresses of this machine without loopback, first the one from which it
    reaches the internet; of IPv6 only that. None where the machine is in no network.
    """
    if listen_host not in EVERYWHERE:
        return [listen_host]
    is_ipv4 = ":" not in listen_host
    found = [str(own.ip) for own in list_own_interfaces()] if is_ipv4 else []
    outgoing = _find_outgoing_host(socket.AF_INET if is_ipv4 else socket.AF_INET6)
    return list(dict.fromkeys(filter(None, [outgoing, *found])))[:_MOST_OWN_HOSTS]


def list_own_interfaces() -> list[IPv4Interface]:
    """Return the IPv4 addresses of this machine without loopback, and their networks.

    Bridges, which mostly lead to containers, count where they lead to the internet as well, or
    there is nothing else.
    """
    outgoing = _find_outgoing_host(socket.AF_INET)
    found: list[IPv4Interface] = []
    bridges: list[IPv4Interface] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            is_bridge = os.path.exists(f"/sys/class/net/{name}/bridge")
            with suppress(OSError):  # it has no address
                for own in _find_addresses(asking, name):
                    (bridges if is_bridge and str(own.ip) != outgoing else found).append(own)
    return found or bridges


def _find_outgoing_host(family: socket.AddressFamily) -> str | None:
    """Return the address from which this machine reaches the internet, if it does."""
    # Not every system has IPv6.
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((_SOMEWHERE[family], 9))
        return asking.getsockname()[0]


def _find_addresses(asking: socket.socket, name: str) -> list[IPv4Interface]:
    """Return the address of an interface, if it leads to others; raises OSError."""
    question = struct.pack("256s", name.encode()[:15])
    (flags,) = struct.unpack_from("H", fcntl.ioctl(asking, _GET_FLAGS, question), 16)
    if flags & _IS_LOOPBACK or not (flags & _IS_UP and flags & _IS_RUNNING):
        return []
    address, netmask = (
        socket.inet_ntoa(fcntl.ioctl(asking, what, question)[20:24])
        for what in (_GET_ADDRESS, _GET_NETMASK)
    )
    return [IPv4Interface(f"{address}/{netmask}")]


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
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
                f"{host} is not an address of this machine; leave out --listen HOST, and give the "
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
    if host in EVERYWHERE:
        raise UsageError(
            f"others cannot dial {host}: give the address that they should use with --announce-host"
        )
