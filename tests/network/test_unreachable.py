"""What is said of addresses where nobody listens: who, why, and what to do."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError, UnavailableError
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress, find_listening
from shoal.protocol.net.tcp.tls import check_certificate

pytestmark = pytest.mark.network

PEER_ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def find_closed_port() -> int:
    """Return a port of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_initial_peers_that_are_gone_come_with_advice() -> None:
    address = PeerAddress.parse(f"/ip4/127.0.0.1/tcp/{find_closed_port()}/p2p/{PEER_ID}")

    with pytest.raises(DirectoryError) as refusal:
        asyncio.run(find_listening([address]))

    assert address.text in str(refusal.value)
    assert "check that one of them still runs" in str(refusal.value)
    assert "from no other one" in str(refusal.value)
    assert "shoal doctor" in str(refusal.value)


def test_closed_port_is_told_without_numbers() -> None:
    port = find_closed_port()
    endpoint = Endpoint("127.0.0.1", port, "0" * 64)

    with pytest.raises(UnavailableError) as refusal:
        asyncio.run(check_certificate(endpoint))

    assert str(refusal.value) == f"nobody answers at 127.0.0.1:{port}: connection refused"
