"""Where a peer dials because strangers say that somebody is there: their announcements are signed,
but nothing keeps them from naming the address of a third party.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TypeVar

from ...endpoints import Endpoint, find_local_network, is_loopback, read_address
from ...errors import NotDialledError, RemoteProtocolError, UnavailableError
from ..addresses import is_address
from ..clock import Clock

_Place = TypeVar("_Place", bound=Endpoint)
_Opened = TypeVar("_Opened")

_MAX_FAILURES = 16
"""Dials of one host that may fail in a minute, under whatever identities."""

_MINUTE = 60.0

_MAX_KEPT = 1024
"""Hosts whose failures are kept, and endpoints that were reached."""

_SUBNET_BITS = {4: 24, 6: 64}
"""How much of a local network a peer shares that is dialled from the internet as well."""


def can_be_dialled(host: str) -> bool:
    """Return whether a host, as a stranger gives it, is the address of one machine.

    >>> [can_be_dialled(host) for host in ("8.8.8.8", "10.0.0.1", "224.0.0.1", "fe80::1%eth0")]
    [True, True, False, False]
    """
    if not is_address(host) or "%" in host:  # behind it anything may stand
        return False
    address = read_address(host)
    if address.is_multicast or address.is_unspecified:
        return False
    return find_local_network(host) is not None or not address.is_reserved


class DialRules:
    """What one peer dials: nothing in a local network unless it announces an address in that
    network itself, and nothing new on a host where many dials have failed in the last minute.

    A client has no such rules: it dials for its user, who chose the swarm. A monitor dials whoever
    announces itself, and has those of a peer at the hosts that it joined through.
    """

    def __init__(self, clock: Clock, own_hosts: Sequence[str]) -> None:
        """`own_hosts` are those that the peer announces."""
        self._clock = clock
        self._own_hosts = own_hosts
        self._failures: dict[str, deque[float]] = {}
        self._reached: dict[Endpoint, None] = {}  # the ones that were reached last come last

    def move(self, own_hosts: Sequence[str]) -> None:
        """From now on go by other hosts that the peer announces."""
        self._own_hosts = own_hosts

    async def open_stream(
        self,
        endpoint: _Place,
        timeout_seconds: float,
        open_allowed: Callable[[_Place, float], Awaitable[_Opened]],
    ) -> _Opened:
        """Open a stream where that is allowed, and note whether it did.

        Raises what `resolve` and `open_allowed` do.
        """
        allowed = await self.resolve(endpoint, timeout_seconds)
        try:
            stream = await open_allowed(allowed, timeout_seconds)
        except (UnavailableError, RemoteProtocolError):
            if allowed not in self._reached:  # a peer was there: nobody named a third party
                self.note_failure(allowed.host)
            raise
        self.note_success(allowed)
        return stream

    async def resolve(self, endpoint: _Place, timeout_seconds: float) -> _Place:
        """Return the endpoint with an address that may be dialled as its host.

        Raises UnavailableError when there is none, NotDialledError when it may have others' fault.
        """
        allowed = await self.locate(endpoint, timeout_seconds)
        is_known = is_loopback(allowed.host) or allowed in self._reached
        if not is_known and self._count_failures(allowed.host) >= _MAX_FAILURES:
            raise NotDialledError(f"too many dials of {endpoint.host} have failed in this minute")
        return allowed

    async def locate(self, endpoint: _Place, timeout_seconds: float) -> _Place:
        """Do as `resolve` does, however many dials have failed: where another limit bounds them."""
        try:
            async with asyncio.timeout(timeout_seconds):
                address = await _resolve(endpoint.host)
                network = find_local_network(address)
                # Public addresses are dialled even while nobody can tell our own.
                own = [] if network is None else [await _resolve(one) for one in self._own_hosts]
        except TimeoutError as error:
            raise UnavailableError(f"nobody says which address {endpoint.host} has") from error
        if network is not None and not _is_shared(address, network, own):
            raise UnavailableError(f"{endpoint} is in a network that this peer does not share")
        return replace(endpoint, host=address)

    def note_failure(self, address: str) -> None:
        """Count a dial that did not lead to a peer."""
        self._failures.setdefault(address, deque(maxlen=_MAX_FAILURES)).append(self._clock.now())
        if len(self._failures) > _MAX_KEPT:
            del self._failures[next(iter(self._failures))]

    def note_success(self, allowed: Endpoint) -> None:
        """Dial an endpoint from now on, whatever else fails on its host: a peer is there."""
        self._reached.pop(allowed, None)
        self._reached[allowed] = None
        if len(self._reached) > _MAX_KEPT:
            del self._reached[next(iter(self._reached))]

    def _count_failures(self, address: str) -> int:
        since = self._clock.now() - _MINUTE
        return sum(at > since for at in self._failures.get(address, ()))


def _is_shared(address: str, network: IPv4Network | IPv6Network, own: Sequence[str]) -> bool:
    """Return whether a peer at its own addresses may dial one of a local network.

    Where strangers from elsewhere are told of it, its subnet has to do.
    """
    if all(find_local_network(one) for one in own):
        return network in map(find_local_network, own)
    near = ((one, _SUBNET_BITS[one.version]) for one in map(read_address, own))
    return any(read_address(address) in ip_network(subnet, strict=False) for subnet in near)


async def _resolve(host: str) -> str:
    """Return the address of a host, the first if it has several. Raises UnavailableError."""
    with suppress(ValueError):
        return str(ip_address(host))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"the host {host} has no address") from error
    return str(found[0][4][0])
