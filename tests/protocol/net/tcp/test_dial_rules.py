"""What a peer dials for others: where it announces itself, and where not too many dials fail."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import NotDialledError, UnavailableError
from shoal.protocol.net.tcp.dial_rules import DialRules


def may_dial(rules: DialRules, host: str) -> bool:
    try:
        run_virtual(rules.resolve(Endpoint(host, 4000, "a" * 64), 1.0))
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize(
    ("own_host", "host", "is_allowed"),
    [
        ("203.0.113.1", "198.51.100.7", True),
        ("203.0.113.1", "2001:db8::7", True),
        ("no.such.host.invalid", "198.51.100.7", True),
        ("no.such.host.invalid", "192.168.1.1", False),
        ("203.0.113.1", "127.0.0.1", False),
        ("203.0.113.1", "localhost", False),
        ("203.0.113.1", "::1", False),
        ("203.0.113.1", "::ffff:127.0.0.1", False),
        ("203.0.113.1", "0.0.0.0", False),
        ("203.0.113.1", "192.168.1.1", False),
        ("203.0.113.1", "::ffff:10.0.0.1", False),
        ("203.0.113.1", "100.64.0.1", False),
        ("203.0.113.1", "169.254.169.254", False),
        ("203.0.113.1", "fe80::1", False),
        ("203.0.113.1", "fd00::1", False),
        ("192.168.1.5", "192.168.1.7", True),
        ("192.168.1.5", "203.0.113.1", True),
        ("192.168.1.5", "10.0.0.1", False),
        ("192.168.1.5", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("127.0.0.1", "192.168.1.1", False),
        ("203.0.113.1 192.168.1.5", "192.168.1.7", True),
        ("203.0.113.1 192.168.1.5", "10.0.0.1", False),
        ("203.0.113.1 10.0.0.5", "10.0.0.7", True),
        ("203.0.113.1 10.0.0.5", "10.0.9.7", False),
        ("10.0.0.5", "10.0.9.7", True),
        ("203.0.113.1 fd00::5", "fd00::7", True),
        ("203.0.113.1 fd00::5", "fd00:0:0:1::7", False),
    ],
)
def test_local_addresses_are_dialled_from_their_own_network_only(
    own_host: str, host: str, is_allowed: bool
) -> None:
    assert may_dial(DialRules(VirtualClock(), own_host.split()), host) == is_allowed


def test_peer_that_moves_dials_in_its_new_network_only() -> None:
    rules = DialRules(VirtualClock(), ["10.0.0.1"])

    rules.move(["192.168.1.5"])

    assert may_dial(rules, "192.168.1.6")
    assert not may_dial(rules, "10.0.0.2")


def test_host_where_dials_fail_is_left_alone_for_a_minute_whoever_is_said_to_be_there() -> None:
    async def story() -> None:
        rules = DialRules(VirtualClock(), ["203.0.113.1"])
        num_dialled = 0
        for second in range(120):
            try:
                await rules.resolve(Endpoint("198.51.100.7", 1 + second, "a" * 64), 1.0)
            except UnavailableError:
                pass
            else:
                num_dialled += 1
                rules.note_failure("198.51.100.7")
            await asyncio.sleep(1)
        assert num_dialled == 32
        await rules.resolve(Endpoint("198.51.100.8", 1, "a" * 64), 1.0)

    run_virtual(story())


def test_peer_that_was_reached_is_dialled_whatever_else_is_said_to_be_on_its_host() -> None:
    async def story() -> None:
        rules = DialRules(VirtualClock(), ["203.0.113.1"])
        honest, unknown = (Endpoint("198.51.100.7", port, "a" * 64) for port in (4000, 4001))
        rules.note_success(await rules.resolve(honest, 1.0))
        for _ in range(16):
            rules.note_failure("198.51.100.7")

        assert await rules.resolve(honest, 1.0) == honest
        with pytest.raises(NotDialledError):
            await rules.resolve(unknown, 1.0)

    run_virtual(story())


def test_peer_that_has_ended_keeps_nobody_from_another_one_on_its_host() -> None:
    async def refuse(endpoint: Endpoint, timeout_seconds: float) -> None:
        raise UnavailableError("connection refused")

    async def story() -> None:
        rules = DialRules(VirtualClock(), ["203.0.113.1"])
        ended, new = (Endpoint("198.51.100.7", port, "a" * 64) for port in (4000, 4001))
        rules.note_success(await rules.resolve(ended, 1.0))
        for _ in range(100):
            with pytest.raises(UnavailableError):
                await rules.open_stream(ended, 1.0, refuse)

        assert await rules.resolve(new, 1.0) == new

    run_virtual(story())


def test_peer_goes_by_the_addresses_that_it_has_now() -> None:
    rules = DialRules(VirtualClock(), ["10.0.0.5"])
    assert may_dial(rules, "10.0.9.7")

    rules.move(["203.0.113.1", "10.0.0.5"])

    assert not may_dial(rules, "10.0.9.7")


def test_local_swarm_in_which_many_are_killed_dials_on() -> None:
    async def story() -> None:
        rules = DialRules(VirtualClock(), ["127.0.0.1"])
        for _ in range(100):
            rules.note_failure("127.0.0.1")
        await rules.resolve(Endpoint("127.0.0.1", 4000, "a" * 64), 1.0)

    run_virtual(story())
