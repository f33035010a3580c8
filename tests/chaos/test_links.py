"""The proxy before a peer carries bytes, holds them back while a link is cut, and breaks links."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from chaos.links import PEER_HOST, PROXY_HOST, STRANGER_HOST, Links, find_owner, is_connected
from chaos.plan import CLIENTS

pytestmark = pytest.mark.network

DEADLINE_SECONDS = 20.0


class Wire:
    """One connection from this process, which is `clients`, through the proxy of a peer."""

    def __init__(self, links: Links, target: str) -> None:
        self.port = links.add(target)
        self._stack = contextlib.ExitStack()
        self._listening = self._stack.enter_context(socket.create_server((PEER_HOST, self.port)))
        self.near = self.dial()
        self.far = self.accept()

    def dial(self) -> socket.socket:
        connected = socket.create_connection((PROXY_HOST, self.port), DEADLINE_SECONDS)
        return self._stack.enter_context(connected)

    def accept(self) -> socket.socket:
        self._listening.settimeout(DEADLINE_SECONDS)
        accepted = self._stack.enter_context(self._listening.accept()[0])
        accepted.settimeout(DEADLINE_SECONDS)
        return accepted

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def links() -> Iterator[Links]:
    with Links(lambda: {os.getpid(): CLIENTS}) as links:
        yield links


@pytest.fixture
def wires(links: Links) -> Iterator[tuple[Wire, Wire]]:
    wires = Wire(links, "P1"), Wire(links, "P2")
    yield wires
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(wires: tuple[Wire, Wire]) -> Wire:
    return wires[0]


def test_link_carries_bytes_both_ways(wire: Wire) -> None:
    wire.near.sendall(b"there")
    wire.far.sendall(b"and back")

    assert wire.far.recv(100) == b"there"
    assert wire.near.recv(100) == b"and back"


def test_cut_link_holds_everything_back_until_it_heals(
    links: Links, wires: tuple[Wire, Wire]
) -> None:
    wire, other = wires
    links.cut("P1", CLIENTS)
    wire.near.sendall(b"held back")
    wire.near.close()
    late = wire.dial()
    late.sendall(b"dialled meanwhile")
    other.near.sendall(b"another link")

    assert other.far.recv(100) == b"another link"  # by now, the rest would have come, too
    wire.far.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.far.recv(100)

    links.heal("P1", CLIENTS)
    wire.far.settimeout(DEADLINE_SECONDS)
    assert wire.far.recv(100) == b"held back"
    assert wire.far.recv(100) == b""
    assert wire.accept().recv(100) == b"dialled meanwhile"


def test_reset_link_breaks_what_is_open_and_takes_new_connections(
    links: Links, wires: tuple[Wire, Wire]
) -> None:
    wire, other = wires
    links.reset("P1", CLIENTS)

    assert wire.near.recv(100) == b""
    assert wire.far.recv(100) == b""
    again = wire.dial()
    again.sendall(b"again")
    assert wire.accept().recv(100) == b"again"
    other.near.sendall(b"another link")
    assert other.far.recv(100) == b"another link"


def test_links_leave_no_connection_open(links: Links, wire: Wire) -> None:
    assert len(links.list_open()) == 2
    links.reset("P1", CLIENTS)

    assert wire.near.recv(100) == b""
    assert links.list_open() == [f"a connection {CLIENTS} to P2"]


def test_owner_of_a_connection_is_the_process_that_dialled(wire: Wire) -> None:
    port = wire.near.getsockname()[1]

    assert find_owner(port, wire.port, {1: "somebody", os.getpid(): "we"}) == "we"
    assert find_owner(port, wire.port, {1: "somebody"}) == ""


def test_connection_to_the_stranger_is_seen_until_it_is_closed() -> None:
    with socket.create_server((STRANGER_HOST, 0)) as listening:
        assert not is_connected(os.getpid(), STRANGER_HOST)
        with socket.create_connection(listening.getsockname()):
            assert is_connected(os.getpid(), STRANGER_HOST)

        assert not is_connected(os.getpid(), STRANGER_HOST)
