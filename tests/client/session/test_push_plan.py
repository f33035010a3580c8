"""Who pushes to whom: pure decisions about hops that are about to be opened."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from announcements import describe_peer
from hand_clock import HandClock

from shoal.client.routing.route import Hop
from shoal.client.routing.route_finder import RouteFinder, SwarmModel
from shoal.client.session.hop_link import LiveHop, MissingHops, StartOverError, cut_segments
from shoal.client.session.push_plan import PushPlan
from shoal.client.session.state import SessionContext, SessionFacts
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import NO_CAPABILITY, ModelId, SessionId
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.records.announcements import shorten
from shoal.protocol.session.recovery_log import RecoveryLog
from shoal.protocol.spans import Span
from shoal.protocol.versions import CHAIN_VERSION

MODEL_ID = ModelId("a" * 32)


def make_hops(versions: str = "222", num_endpoints: int = 1) -> list[LiveHop]:
    """Return hops of a block each; the digits are the newest versions they speak."""
    endpoints = (Endpoint("192.0.2.7", 4040, "f" * 64),) * num_endpoints
    peers = [
        describe_peer(
            peer_id=Identity(bytes([index]) * 32).peer_id,
            model_id=MODEL_ID,
            num_blocks=len(versions),
            span=Span(index, index + 1),
            endpoints=endpoints,
            max_version=int(version),
            issued_at=1.0,
            expires_at=2.0,
        )
        for index, version in enumerate(versions)
    ]
    return [LiveHop(Hop(peer, peer.span), RecoveryLog()) for peer in peers]


def make_plan(delivery: str = "chain", clock: HandClock | None = None) -> PushPlan:
    nobody = cast(Any, None)
    model = SwarmModel(MODEL_ID, 3, 8)
    config = ClientConfig(delivery=delivery)
    directory = MemoryDirectory(MemoryDirectoryStore(), clock or HandClock())
    swarm = RouteFinder(directory, nobody, model, clock or HandClock(), config)
    facts = SessionFacts(MODEL_ID, Span(0, 3), 8, 100, session=SessionId(b"the secret of it"))
    return PushPlan(SessionContext(facts, swarm, nobody, nobody, config, nobody), nobody, nobody)


def make_missing(**changes: Any) -> MissingHops:
    return MissingHops(Span(0, 3), RecoveryLog(), (5, 6), 7, **changes)


def test_every_hop_pushes_to_the_next_with_a_key_of_its_own() -> None:
    hops = make_hops()

    make_plan().plan(hops, make_missing())

    assert [live.feeds for live in hops] == [True, True, False]
    keys = [live.capability for live in hops]
    assert len(set(keys)) == 3
    for live, following in pairwise(hops):
        assert live.next is not None
        assert live.next.peer_id == following.hop.peer.peer_id
        assert live.next.capability == following.capability
        assert live.next.first_sequence == 0
    assert hops[-1].next is None
    assert cut_segments(hops) == [hops]


def test_in_a_star_nobody_pushes_and_nobody_can() -> None:
    hops = make_hops()

    make_plan("star").plan(hops, make_missing())

    assert {live.capability for live in hops} == {NO_CAPABILITY}
    assert [live.next for live in hops] == [None] * 3
    assert cut_segments(hops) == [[live] for live in hops]


@pytest.mark.parametrize(
    ("versions", "segments"),
    [("122", [1, 2]), ("221", [2, 1]), ("212", [1, 1, 1]), ("111", [1, 1, 1])],
)
def test_peers_of_an_older_version_are_spoken_to_directly(
    versions: str, segments: list[int]
) -> None:
    hops = make_hops(versions)

    make_plan().plan(hops, make_missing())

    assert [len(segment) for segment in cut_segments(hops)] == segments
    old = [live for live in hops if live.hop.peer.max_version < CHAIN_VERSION]
    assert {live.capability for live in old} == {NO_CAPABILITY}


def test_peer_that_cannot_be_dialled_is_pushed_nothing() -> None:
    hops = make_hops(num_endpoints=0)

    make_plan().plan(hops, make_missing())

    assert [len(segment) for segment in cut_segments(hops)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("versions", "segments"), [("444", [2, 1]), ("344", [1, 1, 1]), ("434", [1, 1, 1])]
)
def test_peer_is_pushed_to_over_what_it_has_parked_by_who_understands_it(
    versions: str, segments: list[int]
) -> None:
    hops = make_hops(versions, num_endpoints=0)
    second = hops[1].hop
    parked_at = (shorten(hops[0].hop.peer.peer_id),)
    hops[1].hop = replace(second, peer=replace(second.peer, parked_at=parked_at))

    make_plan().plan(hops, make_missing())

    assert [len(segment) for segment in cut_segments(hops)] == segments
    assert hops[0].next is None or hops[0].next.endpoints == ()


def test_last_new_hop_pushes_to_the_one_behind_only_what_that_lacks() -> None:
    *hops, after = make_hops()

    make_plan().plan(hops, make_missing(after=after))

    assert [live.next and live.next.first_sequence for live in hops] == [0, 5]
    assert after.is_log_whole


def test_link_that_failed_is_left_alone_for_a_while_and_longer_the_next_time() -> None:
    hops, clock = make_hops(), HandClock()
    plan = make_plan(clock=clock)

    def can_push() -> list[bool]:
        plan.plan(hops, make_missing())
        return [live.feeds for live in hops]

    for seconds in (30.0, 60.0, 120.0):
        plan.note_broken_link(hops[0], hops[1])
        clock.seconds += seconds - 0.1
        assert can_push() == [False, True, False]
        clock.seconds += 0.2
        assert can_push() == [True, True, False]


def test_hop_before_that_cannot_push_to_the_new_ones_is_of_no_use() -> None:
    before, *hops = make_hops()
    plan = make_plan()
    plan.note_broken_link(before, hops[0])

    with pytest.raises(StartOverError):
        plan.plan(hops, make_missing(before=before))


def test_hop_behind_a_link_that_failed_is_sent_to_from_now_on() -> None:
    *hops, after = make_hops()
    plan = make_plan()
    plan.note_broken_link(hops[-1], after)

    plan.plan(hops, make_missing(after=after))

    assert not hops[-1].feeds
    assert not after.is_log_whole
