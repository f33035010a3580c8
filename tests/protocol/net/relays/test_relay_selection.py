"""Which relays a peer behind a NAT has, while they come and go."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock

from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.errors import DirectoryError, RemoteProtocolError, UnavailableError
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.net.relays.circuit import RelayReservations, read_relay_answer
from shoal.protocol.net.relays.relay_selection import NUM_RELAYS, RelaySelection, rank_relays
from shoal.protocol.net.tcp.dial_rules import DialRules
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

ME = PeerId("me")


def make_relay(number: int) -> Relay:
    return Relay(f"192.0.2.{number}", 4001, PeerId(f"relay {number}"))


def announce_at(relay: Relay, **facts: Any) -> Announcement:
    return describe_peer(
        peer_id=relay.peer_id,
        model_id=ModelId("0" * 64),
        num_blocks=8,
        span=Span(0, 8),
        endpoints=(Endpoint(relay.host, 5000, "0" * 64),),
        issued_at=0.0,
        expires_at=90.0,
        **facts,
    )


class Relays(RelayReservations):
    """Relays that live or not, have places or not, and what is announced of them."""

    def __init__(self, *numbers: int) -> None:
        self.living = {make_relay(number) for number in numbers}
        self.full: set[Relay] = set()
        self.silent: set[Relay] = set()
        self.announced: list[Announcement] = []
        self.is_directory_reachable = True
        self.asked: Counter[Relay] = Counter()
        self.held: set[Relay] = set()
        self.ways: set[str] = set()

    def kill(self, relay: Relay) -> None:
        self.living.discard(relay)
        self.held.discard(relay)

    def announce(self, relay: Relay) -> None:
        self.announced.append(announce_at(relay, relay_port=relay.port))

    async def search(self) -> Iterable[Announcement]:
        if not self.is_directory_reachable:
            raise DirectoryError("nobody answers")
        return self.announced

    async def list_connected(self) -> set[PeerId]:
        return {relay.peer_id for relay in self.living}

    async def reserve(self, relay: Relay, *ways: Relay) -> None:
        self.asked[relay] += 1
        self.ways = {way.host for way in ways or (relay,)}
        if relay in self.silent:
            await asyncio.sleep(4.0)
            raise UnavailableError("does not answer")
        if relay not in self.living or relay in self.full:
            raise UnavailableError("no place")
        self.held.add(relay)


def select_among(relays: Relays, *numbers: int) -> RelaySelection:
    initial = [make_relay(number) for number in numbers]
    return RelaySelection(relays, ME, VirtualClock(), initial, None)


async def test_lost_relay_gives_way_to_one_that_is_announced() -> None:
    relays = Relays(1, 2)
    selection = select_among(relays, 1)
    await selection.renew(relays.search)
    assert selection.relays == (make_relay(1),)

    relays.announce(make_relay(2))
    relays.kill(make_relay(1))

    await selection.renew(relays.search)
    assert selection.relays == (make_relay(2),)
    assert relays.held == {make_relay(2)}


async def test_initial_relays_are_tried_while_the_directory_cannot_be_read() -> None:
    relays = Relays(1, 2, 3, 4)
    selection = select_among(relays, 1, 2, 3, 4)
    await selection.renew(relays.search)
    first = selection.relays
    relays.is_directory_reachable = False
    for relay in first:
        relays.kill(relay)

    await selection.renew(relays.search)
    assert len(selection.relays) == NUM_RELAYS
    assert set(selection.relays) == relays.held


async def test_directory_that_is_lost_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "shoal")
    relays = Relays()
    selection = select_among(relays, 1)
    relays.is_directory_reachable = False

    for _ in range(3):
        await selection.renew(relays.search)
    relays.is_directory_reachable = True
    await selection.renew(relays.search)
    relays.is_directory_reachable = False
    await selection.renew(relays.search)

    assert [level for _, level, _ in caplog.record_tuples] == [logging.WARNING] * 2


async def test_relay_that_was_not_found_for_a_while_is_kept_when_it_is_back() -> None:
    relays = Relays(1)
    selection = select_among(relays)
    relays.announce(make_relay(1))
    await selection.renew(relays.search)
    relays.kill(make_relay(1))
    relays.is_directory_reachable = False
    await asyncio.sleep(60.0)
    await selection.renew(relays.search)

    relays.living.add(make_relay(1))
    await asyncio.sleep(60.0)

    await selection.renew(relays.search)
    assert selection.relays == (make_relay(1),)


async def test_second_relay_is_taken_when_one_appears() -> None:
    relays = Relays(1, 2)
    selection = select_among(relays, 1)
    await selection.renew(relays.search)
    relays.announce(make_relay(2))

    await selection.renew(relays.search)
    assert selection.relays == (make_relay(1),)  # there is one, and nobody hurries
    await asyncio.sleep(30.0)

    await selection.renew(relays.search)
    assert selection.relays == (make_relay(1), make_relay(2))


async def test_relays_of_old_stay_announced_while_there_are_no_others() -> None:
    relays = Relays(1)
    selection = select_among(relays, 1)
    await selection.renew(relays.search)
    relays.kill(make_relay(1))

    await selection.renew(relays.search)
    assert selection.relays == (make_relay(1),)
    relays.living.add(make_relay(1))
    await selection.renew(relays.search)

    assert selection.relays == (make_relay(1),)
    assert relays.held == {make_relay(1)}


async def test_relay_without_a_place_is_passed_by_and_left_alone() -> None:
    relays = Relays(1, 2, 3)
    relays.full = {make_relay(1), make_relay(2)}
    selection = select_among(relays, 1, 2, 3)

    await selection.renew(relays.search)
    asked = dict(relays.asked)
    await selection.renew(relays.search)

    assert selection.relays == (make_relay(3),)
    assert relays.held == {make_relay(3)}
    assert relays.asked == asked


async def test_many_silent_relays_keep_nobody_from_one_that_answers() -> None:
    """Ids can be made up until they come first in the order of one peer."""
    ranked = rank_relays(ME, [make_relay(number) for number in range(1, 10)])
    relays = Relays()
    relays.silent, relays.living = set(ranked[:8]), {ranked[8]}
    for relay in ranked:
        relays.announce(relay)
    selection = RelaySelection(relays, ME, VirtualClock(), [], None)

    for _ in range(4):
        await selection.renew(relays.search)
        await asyncio.sleep(3.0)

    assert selection.relays == (ranked[8],)


async def test_relay_that_fails_is_left_alone_for_longer_each_time_up_to_an_hour() -> None:
    relays = Relays(1, 2)
    selection = select_among(relays, 1)
    await selection.renew(relays.search)
    relays.announce(make_relay(2))
    relays.full = {make_relay(2)}

    for _ in range(6 * 120):
        await asyncio.sleep(30.0)
        await selection.renew(relays.search)

    assert 10 < relays.asked[make_relay(2)] < 15
    relays.full.clear()
    await asyncio.sleep(3600.0)
    await selection.renew(relays.search)
    assert make_relay(2) in selection.relays


async def test_relay_of_ours_that_was_gone_for_a_moment_is_taken_back_soon() -> None:
    relays = Relays(1, 2)
    selection = select_among(relays, 1, 2)
    await selection.renew(relays.search)
    relays.kill(make_relay(1))
    relays.kill(make_relay(2))
    for _ in range(10):
        await asyncio.sleep(3.0)
        await selection.renew(relays.search)

    relays.living.add(make_relay(1))
    await selection.renew(relays.search)
    relays.living.add(make_relay(2))
    await asyncio.sleep(60.0)
    await selection.renew(relays.search)

    assert set(selection.relays) == {make_relay(1), make_relay(2)}


async def test_place_is_asked_for_again_while_the_connection_lasts() -> None:
    """A relay that was restarted has forgotten it, and p2pd may have come back unnoticed."""
    relays = Relays(1)
    selection = select_among(relays, 1)
    for _ in range(40):
        await selection.renew(relays.search)
        await asyncio.sleep(3.0)

    assert relays.asked == {make_relay(1): 2}


async def test_peer_that_does_not_say_that_it_is_a_relay_is_not_asked() -> None:
    relays = Relays(1, 2)
    relays.announced.append(announce_at(make_relay(2)))
    selection = select_among(relays, 1)

    await selection.renew(relays.search)

    assert relays.asked == {make_relay(1): 1}


def test_many_peers_spread_over_the_relays() -> None:
    relays = [make_relay(number) for number in range(5)]

    firsts = Counter(rank_relays(PeerId(f"peer {number}"), relays)[0] for number in range(1000))

    assert len(firsts) == 5
    assert max(firsts.values()) < 250


def test_relay_that_goes_moves_only_those_behind_it() -> None:
    relays = [make_relay(number) for number in range(5)]
    for number in range(100):
        peer_id = PeerId(f"peer {number}")
        ranked = rank_relays(peer_id, relays)

        assert rank_relays(peer_id, [r for r in relays if r != ranked[-1]]) == ranked[:-1]


async def test_no_more_relays_are_taken_than_are_needed() -> None:
    relays = Relays(1, 2, 3, 4, 5)
    selection = select_among(relays, 1, 2, 3, 4, 5)

    await selection.renew(relays.search)

    assert len(relays.held) == NUM_RELAYS
    assert set(selection.relays) == relays.held


@pytest.mark.parametrize(
    "answer",
    [
        b"\x28",
        b"\x28\xff",
        b"\x2b\x01",
        b"\xff" * 40,
        b"\x22\x02\x08",
    ],
)
def test_answer_of_a_relay_that_is_malformed_is_refused(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_relay_answer(answer)


def test_status_is_found_behind_what_we_do_not_read() -> None:
    assert read_relay_answer(bytes([0x08, 2, 0x1A, 3, 1, 2, 3, 0x28, 0xC8, 0x01])).status == 200


def test_relay_that_names_no_limit_has_none() -> None:
    answer = read_relay_answer(bytes([0x08, 2, 0x28, 100]))

    assert answer.limit is None


@pytest.mark.parametrize("answer", [b"", b"\x2a\x01d", b"\x20\x05", b"\x22\x02\x12\x00"])
def test_answer_with_fields_of_other_types_grants_nothing(answer: bytes) -> None:
    assert read_relay_answer(answer).status == 0


async def test_relay_is_tried_at_all_its_addresses_and_known_by_the_first() -> None:
    """Who is in its network joins through an address of that, which means nothing elsewhere."""
    relays, relay = Relays(1), make_relay(1)
    inside = replace(relay, host="10.0.0.7")
    relays.announced = [
        replace(
            announce_at(relay, relay_port=relay.port),
            endpoints=tuple(Endpoint(host, 5000, "0" * 64) for host in (relay.host, inside.host)),
        )
    ]
    selection = RelaySelection(relays, ME, VirtualClock(), [inside], None)
    relays.living.add(inside)

    await selection.renew(relays.search)

    assert selection.relays == (relay,)
    relays.living = {relay}
    assert await selection._reserve(relay)
    assert relays.ways == {relay.host, inside.host}


async def test_relay_that_a_stranger_announces_is_dialled_by_the_rules_of_the_peer() -> None:
    """Its address may be one of the network of this peer, which p2pd would connect to."""
    relays, inside = Relays(), Relay("10.0.0.7", 22, PeerId("relay 1"))
    relays.living = {inside}
    relays.announce(inside)
    rules = DialRules(VirtualClock(), ["203.0.113.1"])
    selection = RelaySelection(relays, ME, VirtualClock(), [], rules)

    await selection.renew(relays.search)

    assert relays.asked == {}
    selection = RelaySelection(relays, ME, VirtualClock(), [inside], rules)  # the owner says so
    await selection.renew(relays.search)
    assert selection.relays == (inside,)


def test_relay_of_several_addresses_counts_once() -> None:
    relay = make_relay(1)

    assert rank_relays(ME, [relay, replace(relay, host="10.0.0.7")]) == [relay]
