"""Which nodes are asked for the records of a key, and who is gone back to."""

from __future__ import annotations

import asyncio
import socket
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from announcements import make_announcement

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.neighbourhood import Neighbourhood, choose_nodes, list_addresses
from shoal.protocol.net.tcp.dial_rules import DialRules

SEED = 7
NEAREST = [f"near{number}" for number in range(20)]


def test_nearest_nodes_are_asked_and_some_others_of_distinct_networks() -> None:
    """Beside the nearest ten, the six places go to trusted nodes, then to one of each network."""
    networks = dict.fromkeys(NEAREST, "liars") | {f"liar{n}": "liars" for n in range(1000)}
    networks |= {f"honest{n}": f"network{n}" for n in range(5)} | {"first": "liars"}

    chosen = choose_nodes(NEAREST, networks, {"first"}, Random(SEED))

    assert chosen[:10] == NEAREST[:10]
    assert chosen[10] == "first"
    assert {networks[node] for node in chosen[11:]} == {f"network{n}" for n in range(5)}
    assert len(chosen) == 16


def test_others_are_drawn_anew_and_no_node_is_asked_twice() -> None:
    networks = {f"node{n}": f"network{n}" for n in range(40)}
    rng = Random(SEED)

    first, second = (choose_nodes(["node1", "node2"], networks, (), rng) for _ in range(2))

    assert first[:2] == second[:2] == ["node1", "node2"]
    assert set(first[2:]) != set(second[2:])
    assert len(set(first)) == len(first) == 16


@pytest.mark.parametrize("num_honest", [10, 100, 1000])
def test_view_is_emptied_only_from_several_times_as_many_networks(num_honest: int) -> None:
    """An attacker has the nearest ten, and one more node in each of his networks; no initial peer
    is left. With 87, 909 and 8,476 networks he has an even chance, about 8.5 for each honest one.
    """
    rng = Random(SEED)

    def count_empty(num_networks: int, trusted: tuple[str, ...] = ()) -> int:
        networks = {f"honest{n}": f"network{n}" for n in range(num_honest)}
        networks |= {f"liar{n}": f"liars{n}" for n in range(num_networks)}
        views = [choose_nodes(NEAREST, networks, trusted, rng) for _ in range(40)]
        return sum(not any(node.startswith("honest") for node in view) for view in views)

    assert count_empty(0) == 0
    assert count_empty(4 * num_honest) < 20
    assert count_empty(20 * num_honest) > 20
    assert count_empty(20 * num_honest, ("honest0",)) == 0


def test_small_swarm_is_asked_whole() -> None:
    assert choose_nodes(["a", "b"], {"a": "net", "b": "net"}, (), Random(SEED)) == ["a", "b"]
    assert choose_nodes([], {}, ("gone",), Random(SEED)) == []


@pytest.mark.parametrize("host", ["300.1.1.1", "1.2", "1:2", "fe80::1%eth0"])
def test_peer_whose_host_cannot_be_hides_no_other(host: str) -> None:
    """Announcements may say so: whoever reads the directory would fail with it."""
    peers = [
        make_announcement(number, endpoints=(Endpoint(name, 4000, "c" * 64),), directory_port=4001)
        for number, name in enumerate((host, "192.0.2.7"), 1)
    ]

    assert [address.host for address in list_addresses(peers)] == ["192.0.2.7"]


def test_peer_through_which_nobody_can_join_has_no_address() -> None:
    assert list_addresses([make_announcement(directory_port=0)]) == []


class NotingRules(DialRules):
    def __init__(self, *own_hosts: str) -> None:
        super().__init__(SystemClock(), own_hosts)
        self.failed: list[str] = []

    def note_failure(self, address: str) -> None:
        self.failed.append(address)


@pytest.mark.parametrize(("own_host", "failed"), [("127.0.0.1", ["127.0.0.1"]), ("8.8.8.8", [])])
def test_announced_node_is_dialled_by_the_rules_of_the_peer(
    own_host: str, failed: list[str]
) -> None:
    """Nobody listens where it is said to be."""
    table = SimpleNamespace(uid_to_peer_id={})
    node: Any = SimpleNamespace(
        protocol=SimpleNamespace(routing_table=table), blacklist=SimpleNamespace(clear=bool)
    )
    rules = NotingRules(own_host)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    peer = make_announcement(endpoints=(Endpoint("127.0.0.1", 1, "c" * 64),), directory_port=port)

    asyncio.run(Neighbourhood(node, cast(Any, None), (), rules).restore([peer]))

    assert rules.failed == failed


def test_peer_may_be_joined_at_each_of_its_hosts() -> None:
    """A router may not lead back into its own network."""
    hosts = ("192.0.2.7", "10.0.0.7", "192.0.2.7")
    endpoints = tuple(Endpoint(host, 4000 + port, "c" * 64) for port, host in enumerate(hosts))

    found = list_addresses([make_announcement(endpoints=endpoints, directory_port=4001)])

    assert [address.host for address in found] == ["192.0.2.7", "10.0.0.7"]
