"""Dialling and greeting a peer, over the loopback transport."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface
from typing import Any

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.errors import SilentError, UnavailableError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net import dialling
from shoal.protocol.net.dialling import dial_peer, open_greeted
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

SPAN = Span(0, 4)
PEER_ID = Identity(bytes(32)).peer_id
MODEL = ModelId("a" * 32)

RELAY, NEAR, REFUSING, NOBODY = "192.0.2.7", "10.0.1.2", "10.0.1.3", "10.0.1.4"
"""A relay, and machines of a local network; the last one is switched off."""


def make_peer(*endpoints: Endpoint) -> Announcement:
    return describe_peer(
        peer_id=PEER_ID,
        model_id=MODEL,
        num_blocks=4,
        span=SPAN,
        endpoints=endpoints,
        issued_at=0.0,
        expires_at=90.0,
    )


def test_peer_that_never_answers_the_greeting_is_hung_up_on_in_time() -> None:
    hung_up_at: list[float] = []

    async def say_nothing(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass
        hung_up_at.append(VirtualClock().now())

    async def main() -> None:
        network = LoopbackNetwork()
        near, far = LoopbackTransport(network, "near"), LoopbackTransport(network, "far")
        listener = await far.listen("far", 0, say_nothing)
        with pytest.raises(SilentError, match="did not answer in time"):
            await open_greeted(near, VirtualClock(), make_peer(listener.endpoint), SPAN, 2.0)
        await asyncio.sleep(1.0)
        await near.close()
        await far.close()

    run_virtual(asyncio.wait_for(main(), 60.0))

    assert hung_up_at == [2.0]


def test_silent_endpoint_leaves_time_for_the_next() -> None:
    async def welcome(stream: Stream) -> None:
        await stream.receive()
        await stream.send(encode_frame(Welcome(1, "far", PEER_ID, MODEL, SPAN, 0.0)))
        await stream.receive()

    async def main() -> None:
        network = LoopbackNetwork()
        near, far = LoopbackTransport(network, "near"), LoopbackTransport(network, "far")
        listener = await far.listen("far", 0, welcome)
        silent = replace(listener.endpoint, host="silent", port=4000)
        network.partition("near", "silent")
        peer = make_peer(silent, listener.endpoint)

        stream, _ = await open_greeted(near, VirtualClock(), peer, SPAN, 2.0)

        assert VirtualClock().now() == 1.0
        await stream.close()
        await near.close()
        await far.close()

    run_virtual(asyncio.wait_for(main(), 60.0))


def test_endpoints_with_another_key_than_the_first_are_not_dialled() -> None:
    victim_dials = list[Stream]()

    async def note(stream: Stream) -> None:
        victim_dials.append(stream)

    async def main() -> None:
        network = LoopbackNetwork()
        near, victim = LoopbackTransport(network, "near"), LoopbackTransport(network, "victim")
        listener = await victim.listen("victim", 0, note)
        bare = Endpoint("nowhere", 1)
        own, victims = Endpoint("nowhere", 2, "c" * 64), listener.endpoint
        with pytest.raises(UnavailableError):
            await dial_peer(near, VirtualClock(), make_peer(bare, own, victims), 2.0)
        assert not victim_dials
        await (await dial_peer(near, VirtualClock(), make_peer(bare, victims), 2.0)).close()
        await near.close()
        await victim.close()

    run_virtual(asyncio.wait_for(main(), 60.0))

    assert len(victim_dials) == 1


@dataclass(frozen=True)
class Answer:
    """A stream from one host."""

    host: str
    closed: list[str]

    async def close(self) -> None:
        self.closed.append(self.host)


class WatchedTransport:
    """Answers at the relay and at one machine of the local network, some seconds after a dial."""

    def __init__(self, near_seconds: float = 0.5) -> None:
        self._near_seconds = near_seconds
        self.began: list[tuple[str, float]] = []
        self.hung_up: list[str] = []
        self.opened: list[str] = []
        self.closed: list[str] = []

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Answer:
        self.began.append((endpoint.host, VirtualClock().now()))
        if endpoint.host == REFUSING:
            raise UnavailableError("it refused the connection")
        seconds = {NOBODY: 1000.0, NEAR: self._near_seconds}.get(endpoint.host, 0.5)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.hung_up.append(endpoint.host)
            raise
        self.opened.append(endpoint.host)
        return Answer(endpoint.host, self.closed)


def make_relayed(
    monkeypatch: pytest.MonkeyPatch, own: str, *hosts: str, **facts: Any
) -> Announcement:
    """Return a relayed peer with local endpoints, and have this machine at its own address."""
    monkeypatch.setattr(dialling, "list_own_interfaces", lambda: [IPv4Interface(own)])
    local = tuple(Endpoint(host, 4000, "c" * 64) for host in hosts)
    facts = {"relays": (Relay(RELAY, 4001, PEER_ID),)} | facts
    return replace(make_peer(), local_endpoints=local, **facts)


def dial_relayed(
    monkeypatch: pytest.MonkeyPatch, own: str, *hosts: str, **facts: Any
) -> tuple[str, WatchedTransport]:
    """Dial a relayed peer with local endpoints from a machine; return which of them answered."""
    transport: Any = WatchedTransport()
    peer = make_relayed(monkeypatch, own, *hosts, **facts)

    answered: Any = run_virtual(dial_peer(transport, VirtualClock(), peer, 5.0))
    return answered.host, transport


def test_peer_behind_relays_is_dialled_within_its_network_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, transport = dial_relayed(monkeypatch, "10.0.1.9/24", NEAR)

    assert answered == NEAR
    assert transport.began == [(NEAR, 0.0), (RELAY, 0.25)]
    assert transport.hung_up == [RELAY]


def test_relay_takes_over_where_nobody_is_at_the_address_in_our_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, transport = dial_relayed(monkeypatch, "10.0.1.9/24", NOBODY)

    assert answered == RELAY
    assert transport.began == [(NOBODY, 0.0), (RELAY, 0.25)]
    assert transport.hung_up == [NOBODY]


def test_time_of_a_relays_dial_tells_nothing_of_our_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger may announce its own relay, and any address here."""
    answered, transport = dial_relayed(monkeypatch, "10.0.1.9/24", REFUSING)

    assert answered == RELAY
    assert transport.began == [(REFUSING, 0.0), (RELAY, 0.25)]


def test_one_stream_is_left_where_both_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = WatchedTransport(near_seconds=0.75)
    peer = make_relayed(monkeypatch, "10.0.1.9/24", NEAR)

    answered: Any = run_virtual(dial_peer(transport, VirtualClock(), peer, 5.0))

    assert answered.host == NEAR
    assert transport.hung_up + transport.closed == [RELAY]


@pytest.mark.parametrize("num_turns", range(6))
def test_no_stream_is_left_where_the_caller_is_cancelled_when_it_is_open(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    transport: Any = WatchedTransport()
    peer = make_relayed(monkeypatch, "10.0.1.9/24", NEAR)

    async def main() -> None:
        dialling = asyncio.create_task(dial_peer(transport, VirtualClock(), peer, 5.0))
        await asyncio.sleep(0.5)  # now it is open, or within a few turns
        for _ in range(num_turns):
            await asyncio.sleep(0)
        dialling.cancel()
        await asyncio.wait([dialling])
        answer: Any = None if dialling.cancelled() else dialling.result()
        taken = [] if answer is None else [answer.host]
        assert taken + transport.closed == transport.opened
        assert len(transport.opened + transport.hung_up) == 2  # of the relay as well

    run_virtual(main())


@pytest.mark.parametrize("own", ["10.0.2.9/24", "10.0.1.9/32", "192.168.1.9/16"])
def test_local_endpoints_are_dialled_from_their_own_network_only(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    answered, transport = dial_relayed(monkeypatch, own, NEAR)

    assert answered == RELAY
    assert transport.began == [(RELAY, 0.0)]


def test_local_endpoints_of_a_peer_that_can_be_dialled_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoints = (Endpoint("192.0.2.9", 4000, "c" * 64),)

    answered, transport = dial_relayed(monkeypatch, "10.0.1.9/24", NEAR, endpoints=endpoints)

    assert answered == "192.0.2.9"
    assert transport.began == [("192.0.2.9", 0.0)]


def test_failure_of_every_way_is_that_of_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="refused"):
        dial_relayed(monkeypatch, "10.0.1.9/24", REFUSING, relays=(Relay(REFUSING, 4001, PEER_ID),))
