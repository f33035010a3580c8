"""Ports that a router forwards to this machine, by UPnP, where its owner has asked for that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from ...endpoints import find_local_network
from ...errors import UsageError
from ..addresses import is_address
from ..tasks import cancel_all

_logger = logging.getLogger(__name__)

_DISCOVERY_MILLISECONDS = 2000

LEASE_SECONDS = 3600
"""How long a router forwards a port that nobody asks for again: we may be killed."""

_NAME = "shoal"


class PortMapping:
    """The ports that one router forwards. Made by `open_mapping`, which gives them back."""

    def __init__(self, router: Any, host: str) -> None:
        self._router = router
        self._ports: list[int] = []
        self.host = host
        """The address of the router on the internet."""

    async def add(self, port: int) -> None:
        """Have the router forward a TCP port, under the same number; raises UsageError."""
        await asyncio.to_thread(self._add, port)
        self._ports.append(port)

    def _add(self, port: int) -> None:
        router = self._router
        try:
            router.addportmapping(port, "TCP", router.lanaddr, port, _NAME, "", LEASE_SECONDS)
        except Exception as error:
            raise UsageError(
                f"the router does not forward TCP port {port} by UPnP ({error}): forward the "
                "ports by hand, and leave out --port-mapping"
            ) from error

    async def renew(self) -> None:
        """Ask again for each port, of the router that is there by now: it gets other addresses."""
        try:
            self._router, self.host = await asyncio.to_thread(_find_router)
        except UsageError as error:
            _logger.warning("%s", error)
            return
        for port in self._ports:
            try:
                await asyncio.to_thread(self._add, port)
            except UsageError as error:
                _logger.warning("%s", error)

    async def keep(self) -> None:
        """Ask again in time, until cancelled."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 2)
            await self.renew()

    async def close(self) -> None:
        """Give the ports back, as far as the router answers."""
        for port in self._ports:
            with suppress(Exception):  # it raises nothing more special
                await asyncio.to_thread(self._router.deleteportmapping, port, "TCP")


@asynccontextmanager
async def open_mapping() -> AsyncGenerator[PortMapping]:
    """Find the router and keep what is mapped there until the end.

    Raises UsageError where no router in this network offers UPnP, or it has no public address.
    """
    mapping = PortMapping(*await asyncio.to_thread(_find_router))
    keeping = asyncio.create_task(mapping.keep())
    try:
        yield mapping
    finally:
        await cancel_all([keeping])
        await mapping.close()


def _find_router() -> tuple[Any, str]:
    """Return the gateway that answers to UPnP, and its address; raises UsageError."""
    try:
        import miniupnpc
    except ImportError as error:
        raise UsageError("--port-mapping needs miniupnpc: pip install miniupnpc") from error
    router = miniupnpc.UPnP()
    router.discoverdelay = _DISCOVERY_MILLISECONDS
    try:
        router.discover()
        router.selectigd()
        host = router.externalipaddress() or ""
    except Exception as error:
        raise UsageError(
            "no router in this network answers to UPnP: leave out --port-mapping, and do what is "
            "said at the start without it"
        ) from error
    if not is_address(host) or find_local_network(host) is not None:
        raise UsageError(
            f"the router has no public address itself ({host or 'none'}), so "
            "--port-mapping is no use: leave it out, and join through a peer that is a relay"
        )
    return router, host
