"""Whether a peer can be dialled, as those find out who try."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream

pytestmark = [pytest.mark.network, pytest.mark.slow]

Ask = Callable[[Endpoint], Awaitable[bool]]


async def never(stream: Stream) -> None:
    raise AssertionError("nobody opens a stream here")


def run(test: Callable[[Ask, Endpoint], Awaitable[None]], num_others: int = 1) -> None:
    """Run a test with a way to ask others, and an endpoint that they can dial."""
    from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
    from shoal.protocol.net.libp2p.p2p_daemon import (
        start_reading_p2pd,
        start_serving_p2pd,
        stop_p2pd,
    )
    from shoal.protocol.net.relays.reachability import answer_dial_back, can_be_dialled

    async def main() -> None:
        others = [await start_serving_p2pd([], None, "127.0.0.1", 0) for _ in range(num_others)]
        for other in others:
            await answer_dial_back(other)
        addresses = [str((await other.get_visible_maddrs())[0]) for other in others]
        asking = await start_reading_p2pd([PeerAddress.parse(text) for text in addresses], None)
        transport = TcpTransport()
        endpoint = (await transport.listen("127.0.0.1", 0, never)).endpoint
        try:
            await test(lambda at: can_be_dialled(asking, at), endpoint)
        finally:
            await transport.close()
            for p2p in (asking, *others):
                await stop_p2pd(p2p)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def no_warnings_of_hivemind() -> None:
    import warnings

    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")


def test_open_port_is_reached() -> None:
    async def test(ask: Ask, endpoint: Endpoint) -> None:
        assert await ask(endpoint)

    run(test)


def test_closed_port_is_not_reached() -> None:
    async def test(ask: Ask, endpoint: Endpoint) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            closed = Endpoint("127.0.0.1", unused.getsockname()[1], endpoint.fingerprint)

            assert not await ask(closed)
            assert not await ask(closed)

    run(test)


def test_peer_asks_once_more_when_nobody_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older peers answer a second question of one host with "not tried" for ten seconds."""
    from shoal.protocol.net.relays import reachability

    verdicts = [reachability.NOT_TRIED, reachability.NOT_REACHED]

    async def answer_as_before(p2p: Any) -> None:
        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
            await reader.readexactly(reachability.QUESTION.size)
            writer.write(verdicts.pop(0) + b"127.0.0.1")
            await writer.drain()
            writer.close()

        await p2p.add_binary_stream_handler(reachability.PROTOCOL, serve)

    monkeypatch.setattr(reachability, "answer_dial_back", answer_as_before)
    monkeypatch.setattr(reachability, "PAUSE_SECONDS", 0.1)

    async def test(ask: Ask, endpoint: Endpoint) -> None:
        assert not await ask(endpoint)
        assert not verdicts

    run(test)


def test_other_key_at_the_port_is_not_reached() -> None:
    async def test(ask: Ask, endpoint: Endpoint) -> None:
        assert not await ask(Endpoint("127.0.0.1", endpoint.port, "0" * 64))

    run(test)


def test_first_peer_of_a_swarm_takes_itself_for_reachable() -> None:
    async def test(ask: Ask, endpoint: Endpoint) -> None:
        assert await ask(endpoint)

    run(test, num_others=0)


@pytest.mark.parametrize(("host", "expected"), [("10.0.0.1", False), ("peer.example", True)])
def test_private_host_that_is_not_the_one_dialled_is_not_reached(host: str, expected: bool) -> None:
    """The question has no host, so that no third party can be named: who asks compares."""

    async def test(ask: Ask, endpoint: Endpoint) -> None:
        assert await ask(Endpoint(host, endpoint.port, endpoint.fingerprint)) is expected

    run(test)
