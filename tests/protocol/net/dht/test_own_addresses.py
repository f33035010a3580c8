"""Where a peer that runs is announced, when its machine or its router gets another address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from virtual_time import VirtualClock

from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.ids import PeerId
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import make_public
from shoal.protocol.net.dht import internet
from shoal.protocol.net.dht.internet import InternetNetwork, Listening
from shoal.protocol.net.network import Addresses
from shoal.protocol.net.relays.reach import Reach, Scope
from shoal.protocol.net.tcp.dial_rules import DialRules

PEER = PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")
ROUTER = "198.51.100.7"


class FakeDirectory:
    """A directory that says what it is told to, and moves."""

    membership = make_public(bytes(16))
    is_relay = True

    def __init__(self, own_hosts: Sequence[str], reach: Reach) -> None:
        self.own_hosts, self.reach = list(own_hosts), reach
        self.answers: list[Reach] = []
        self.others: list[str] = []
        self.joined_through: list[str] = []
        self.relays: list[Relay] = []

    @property
    def hosts(self) -> Sequence[str]:
        return self.reach.list_hosts(self.own_hosts)

    @property
    def addresses(self) -> Sequence[str]:
        return [f"/ip4/{host}/tcp/4001/p2p/{PEER}" for host in self.hosts]

    @property
    def scope(self) -> str:
        return self.reach.scope

    def list_others(self) -> list[str]:
        return self.others

    def move(self, own_hosts: Sequence[str]) -> None:
        self.own_hosts = list(own_hosts)

    async def renew_reach(self) -> bool:
        if self.answers:
            self.reach = self.answers.pop(0)
            return True
        return False


class Machine:
    """A peer on a machine whose addresses change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str, reach: Reach) -> None:
        self.hosts = list(hosts)
        monkeypatch.setattr(internet, "list_own_hosts", lambda _: list(self.hosts))
        network = InternetNetwork(VirtualClock(), listening=Listening("0.0.0.0"))
        self.rules = DialRules(network.clock, network.listening.list_hosts())
        self.directory = FakeDirectory(network.listening.list_hosts(), reach)
        directory: Any = self.directory
        self.own = internet._OwnAddresses(
            network, directory, self.rules, None, Endpoint("0.0.0.0", 4002), 4001
        )

    async def find(self) -> list[str]:
        return [endpoint.host for endpoint in (await self.own.find()).endpoints]


async def test_peer_is_announced_where_its_machine_is_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, reach=Reach(Scope.UNKNOWN))
    assert await machine.find() == ["127.0.0.1"]

    machine.hosts = ["10.0.0.2"]
    found: Addresses = await machine.own.find()

    assert [str(endpoint) for endpoint in found.endpoints] == ["10.0.0.2:4002"]
    assert found.facts["dialled"] == [f"/ip4/10.0.0.2/tcp/4001/p2p/{PEER}"]
    assert found.relay_port == 4001


async def test_network_that_is_gone_for_a_while_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", reach=Reach(Scope.UNKNOWN))

    machine.hosts = []

    assert await machine.find() == ["10.0.0.2"]


async def test_peer_that_is_no_relay_any_more_is_not_announced_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", reach=Reach(Scope.UNKNOWN))

    machine.directory.is_relay = False

    assert (await machine.own.find()).relay_port == 0


async def test_router_that_forwards_is_asked_for_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", reach=Reach(Scope.INTERNET, ROUTER))
    machine.directory.answers = [Reach(Scope.INTERNET, "203.0.113.9")]

    found = [await machine.find() for _ in range(internet._LOOKS_PER_QUESTION)]

    assert found[0] == [ROUTER, "10.0.0.2"]
    assert found[-1] == ["203.0.113.9", "10.0.0.2"]


async def test_others_are_asked_after_a_move_until_one_of_them_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", reach=Reach(Scope.INTERNET, ROUTER))

    machine.hosts = ["192.168.1.5"]
    assert await machine.find() == [ROUTER, "192.168.1.5"]  # nobody answers yet
    machine.directory.answers = [Reach(Scope.NOBODY, "203.0.113.9")]

    assert await machine.find() == ["192.168.1.5"]


async def test_code_of_the_first_peer_names_others_as_long_as_they_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", "192.168.1.5", reach=Reach(Scope.UNKNOWN))
    others = [f"/ip4/192.0.2.{number}/tcp/4001/p2p/{PEER}" for number in range(1, 5)]
    own = list(machine.directory.addresses)

    async def read_code() -> list[str]:
        facts: Any = (await machine.own.find()).facts
        return list(JoinCode.parse(facts["join_codes"]["serve"]).addresses)

    assert await read_code() == own
    machine.directory.others = others[:1]
    assert await read_code() == [*own, others[0]]
    machine.directory.others = others[::-1]
    assert await read_code() == [*own, others[0], others[3]]
    fits_no_code = f"/dns4/{'a' * 200}/tcp/4001/p2p/{PEER}"
    machine.directory.others = [fits_no_code, *others[1:]]
    assert await read_code() == [*own, others[3], others[1]]


@pytest.mark.parametrize("is_relayed", [False, True])
async def test_code_of_a_peer_that_has_joined_names_those_that_live(
    is_relayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, "10.0.0.2", reach=Reach(Scope.UNKNOWN))
    first, other = (f"/ip4/192.0.2.{number}/tcp/4001/p2p/{PEER}" for number in (1, 2))
    own = [] if is_relayed else list(machine.directory.addresses)
    machine.directory.joined_through = [first]
    machine.directory.relays = [Relay("192.0.2.1", 4001, PEER)] * is_relayed

    async def read_code() -> list[str]:
        facts: Any = (await machine.own.find()).facts
        return list(JoinCode.parse(facts["join_codes"]["serve"]).addresses)

    assert await read_code() == [*own, first]  # nobody is known to be gone
    machine.directory.others = [other, first]
    assert await read_code() == [*own, first, other]
    machine.directory.others = [other]
    assert await read_code() == [*own, other]


@pytest.mark.parametrize(
    ("own_hosts", "expected"),
    [(["10.0.0.2"], ["peer.example", "10.0.0.2"]), ([], ["peer.example"])],
)
def test_peer_is_announced_in_its_own_network_as_well(
    own_hosts: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its router may not lead back there."""
    monkeypatch.setattr(internet, "list_own_hosts", lambda _: list(own_hosts))

    assert Listening("0.0.0.0", announce_host="peer.example").list_hosts() == expected


def test_peer_that_listens_on_this_machine_is_announced_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Listening("127.0.0.1", announce_host="peer.example").list_hosts() == ["peer.example"]
    assert Listening("127.0.0.1").list_hosts() == ["127.0.0.1"]
