"""One kind of transport at a time, for tests that every kind has to pass."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from libp2p_parts import OwnLibp2pTransport

from shoal.protocol.endpoints import Endpoint, Libp2pEndpoint
from shoal.protocol.errors import UnavailableError
from shoal.protocol.identity import Identity
from shoal.protocol.membership.membership import Membership
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Listener, Stream, StreamServer, Transport


class Seam:
    """Makes transports of one kind, and closes them.

    Nothing may be left behind that asyncio has to complain about.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._network = LoopbackNetwork(seed=1)
        self._transports: list[Transport] = []
        self._complaints: list[dict[str, Any]] = []

    def transport(self, host: str = "server", membership: Membership | None = None) -> Transport:
        if self.name == "loopback":
            made: Transport = LoopbackTransport(self._network, host, membership)
        elif self.name == "libp2p":
            made = OwnLibp2pTransport(is_listening=host == "server")
        else:
            made = TcpTransport(membership=membership)
        self._transports.append(made)
        return made

    def host(self) -> str:
        return "server" if self.name == "loopback" else "127.0.0.1"

    async def listen(self, serve: StreamServer, membership: Membership | None = None) -> Listener:
        return await self.transport("server", membership).listen(self.host(), 0, serve)

    @property
    def num_idle_tasks(self) -> int:
        """Tasks with one listener and one dialler that have no stream, the test itself included.

        A TCP listener waits for its next stream in one. hivemind has three for each p2pd, and one
        that listens to it.
        """
        return {"loopback": 1, "libp2p": 8}.get(self.name, 2)

    def misname(self, endpoint: Endpoint) -> Endpoint:
        """Return the same address with proof that somebody else would have to give."""
        if isinstance(endpoint, Libp2pEndpoint):
            return replace(endpoint, peer_id=Identity(bytes(32)).peer_id)
        return replace(endpoint, fingerprint="0" * 64)

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._complaints.append(context))

    async def end(self) -> None:
        for transport in self._transports:
            await transport.close()
        await wait_until(lambda: len(asyncio.all_tasks()) == 1)
        gc.collect()
        assert self._complaints == []


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for what happens behind the seam, where no event says so."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


async def expect_unavailable(awaitable: Awaitable[object]) -> None:
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(5):
            await awaitable


async def send_all(stream: Stream, frames: list[bytes]) -> None:
    for frame in frames:
        await stream.send(frame)
