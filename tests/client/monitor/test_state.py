"""The state of a watched swarm: who is there, how many replicas blocks have, and what happened."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from announcements import MODEL, NOW, identity_of, make_announcement
from watched_swarms import read

from shoal.client.monitor.description import describe
from shoal.client.monitor.page.view import make_view
from shoal.client.monitor.state import (
    MOST_DEPARTED,
    EventKind,
    Health,
    ProbeResult,
    SwarmState,
    Visibility,
    reduce_failure,
    reduce_probe,
    reduce_reading,
)
from shoal.client.monitor.what_if import find_block_bytes, imagine_loss, imagine_newcomer
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.records.announcements import Announcement, PeerState, TrainingProgress
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span

FIRST, SECOND = (identity_of(number).peer_id for number in (1, 2))
HALVES = (make_announcement(1), make_announcement(2, span=Span(4, 8)))


def renew(announcement: Announcement, now: float, **changes: Any) -> Announcement:
    """Return what a peer announces next."""
    dates = {"issued_at": now, "expires_at": now + 90, "sequence": announcement.sequence + 1}
    return replace(announcement, **(dates | changes))


def list_kinds(state: SwarmState, *announced: Announcement, now: float) -> list[EventKind]:
    return [event.kind for event in reduce_reading(state, MODEL, announced, now)[1]]


@pytest.mark.parametrize(
    ("announced", "health", "missing", "single"),
    [
        ([(0, 8), (0, 8)], Health.HEALTHY, [], []),
        ([(0, 8), (0, 4)], Health.DEGRADED, [], [Span(4, 8)]),
        ([(0, 4), (3, 6)], Health.FAILING, [Span(6, 8)], [Span(0, 3), Span(4, 6)]),
    ],
)
def test_health_is_that_of_the_block_with_fewest_replicas(
    announced: list[tuple[int, int]], health: Health, missing: list[Span], single: list[Span]
) -> None:
    peers = [make_announcement(n, span=Span(*span)) for n, span in enumerate(announced, 1)]

    state = read(*peers)

    model = state.models[MODEL]
    assert (state.health, model.health) == (health, health)
    assert (model.find_spans(0), model.find_spans(1)) == (missing, single)


def test_swarm_is_unknown_before_it_is_read_and_while_nobody_answers() -> None:
    assert SwarmState().health is Health.UNKNOWN
    state = read(*HALVES)

    silent, events = reduce_failure(state, "nobody answers")

    assert (silent.health, silent.error, events) == (Health.UNKNOWN, "nobody answers", ())
    assert silent.models == state.models  # what is known stays, and grows old
    assert read(*HALVES, state=silent, now=NOW + 5).error == ""


def test_swarm_without_models_fails() -> None:
    assert SwarmState(read_at=NOW).health is Health.FAILING


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.DRAINING])
def test_only_peers_that_are_online_are_replicas(state: PeerState) -> None:
    joined = read(make_announcement(1, span=Span(0, 8), state=state))

    assert joined.models[MODEL].depths == (0,) * 8


def test_peers_that_disagree_about_the_model_are_no_replicas() -> None:
    liar = make_announcement(3, num_blocks=4, span=Span(0, 4))

    model = read(*HALVES, liar).models[MODEL]

    assert (model.num_blocks, model.depths) == (8, (1,) * 8)


def test_first_reading_is_no_news_and_later_changes_are() -> None:
    assert list_kinds(SwarmState(), *HALVES, now=NOW) == []
    state, later = read(HALVES[0]), NOW + 20
    first = HALVES[0]

    joined, events = reduce_reading(state, MODEL, HALVES, later)
    assert events == ()  # anybody can announce anything
    _, (event,) = reduce_probe(joined, MODEL, SECOND, ProbeResult(later))
    assert (event.kind, event.peer_id) == (EventKind.JOINED, SECOND)
    assert list_kinds(state, renew(first, later), now=later) == []
    drains = renew(first, later, state=PeerState.DRAINING)
    assert list_kinds(state, drains, now=later) == [EventKind.DRAINING]
    moved = renew(first, later, span=Span(2, 6))
    assert list_kinds(state, moved, now=later) == [EventKind.MOVED]
    gone = renew(first, later, state=PeerState.OFFLINE)
    assert list_kinds(state, gone, now=later) == [EventKind.LEFT]


def test_killed_peer_is_not_seen_after_a_period_and_lost_when_a_dial_fails() -> None:
    state = read(*HALVES)

    alive = renew(HALVES[1], NOW + 30)
    punctual = read(HALVES[0], alive, state=state, now=NOW + 34)
    assert punctual.models[MODEL].peers[FIRST].visibility is Visibility.SEEN
    late = read(HALVES[0], alive, state=punctual, now=NOW + 36)
    assert late.models[MODEL].peers[FIRST].visibility is Visibility.NOT_SEEN
    assert late.models[MODEL].depths == (1,) * 8  # it may be there still

    fault = ProbeResult(NOW + 37, "nobody listens on that port")
    lost, events = reduce_probe(late, MODEL, FIRST, fault)

    assert lost.models[MODEL].depths == (0, 0, 0, 0, 1, 1, 1, 1)
    (event,) = events
    assert (event.kind, event.peer_id, event.detail) == (EventKind.LOST, FIRST, fault.fault)
    still = read(HALVES[0], alive, state=lost, now=NOW + 40)
    assert still.models[MODEL].peers[FIRST].visibility is Visibility.LOST
    again = renew(HALVES[0], NOW + 50)
    assert list_kinds(still, again, alive, now=NOW + 50) == [EventKind.BACK]


def test_late_peer_that_answers_is_seen() -> None:
    late = read(HALVES[0], state=read(HALVES[0]), now=NOW + 36)

    seen, events = reduce_probe(late, MODEL, FIRST, ProbeResult(NOW + 37, rtt_seconds=0.01))

    assert (seen.models[MODEL].peers[FIRST].visibility, events) == (Visibility.SEEN, ())
    later = read(HALVES[0], state=seen, now=NOW + 60)
    assert later.models[MODEL].peers[FIRST].visibility is Visibility.SEEN


def probe(state: SwarmState, peer_id: PeerId, *faults: str, is_refusal: bool = False) -> SwarmState:
    for fault in faults:
        state, events = reduce_probe(state, MODEL, peer_id, ProbeResult(NOW, fault, is_refusal))
        assert EventKind.LOST not in [event.kind for event in events]
    return state


def test_peer_that_has_never_answered_is_no_replica() -> None:
    state = read(*HALVES)
    announced = make_announcement(3, span=Span(0, 8))
    state, _ = reduce_reading(state, MODEL, [*HALVES, announced], NOW + 1)
    third = announced.peer_id
    assert state.health is Health.DEGRADED

    state = probe(state, third, "a firewall")

    model = state.models[MODEL]
    assert (model.depths, model.num_unconfirmed, model.health) == ((1,) * 8, 1, Health.DEGRADED)
    assert model.peers[third].visibility is Visibility.SEEN
    state = probe(state, third, "")
    assert state.models[MODEL].depths == (2,) * 8


def test_peer_that_fails_two_dials_in_a_row_is_no_replica_any_more() -> None:
    state = probe(read(*HALVES), FIRST, "silent", "", "silent")
    assert state.models[MODEL].depths == (1,) * 8

    state = probe(state, FIRST, "silent")

    assert state.models[MODEL].depths == (0, 0, 0, 0, 1, 1, 1, 1)
    assert state.models[MODEL].peers[FIRST].answered_at == NOW
    assert probe(state, FIRST, "").models[MODEL].depths == (1,) * 8


def test_peer_that_refuses_is_there_and_may_be_a_replica() -> None:
    busy = "refused: it has too many streams"
    confirmed = probe(read(*HALVES), FIRST, busy, busy, is_refusal=True)
    assert confirmed.models[MODEL].depths == (1,) * 8

    state, _ = reduce_reading(read(HALVES[0]), MODEL, HALVES, NOW)
    state = probe(state, SECOND, busy, is_refusal=True)

    assert (state.models[MODEL].depths, state.health) == ((1, 1, 1, 1, 0, 0, 0, 0), Health.UNKNOWN)


def test_state_is_unknown_and_not_failing_until_peers_have_been_dialled() -> None:
    state, _ = reduce_reading(SwarmState(), MODEL, HALVES, NOW)
    assert (state.health, state.models[MODEL].depths) == (Health.UNKNOWN, (0,) * 8)
    state = probe(state, FIRST, "")
    assert state.health is Health.UNKNOWN  # the other half may be there

    assert probe(state, SECOND, "").health is Health.DEGRADED
    assert probe(state, SECOND, "closed port").health is Health.FAILING


def test_model_whose_peers_have_never_answered_says_nothing_of_the_swarm() -> None:
    whole = [make_announcement(number, span=Span(0, 8)) for number in (1, 2)]
    fake = make_announcement(3, model_id=ModelId("f" * 32))

    state, _ = reduce_reading(read(*whole), fake.model_id, [fake], NOW)
    assert state.health is Health.HEALTHY
    state, _ = reduce_probe(state, fake.model_id, fake.peer_id, ProbeResult(NOW, "closed port"))

    assert (state.health, state.models[fake.model_id].health) == (Health.HEALTHY, Health.UNKNOWN)
    # One that has answered does, also when all of its peers are gone.
    gone = read(state=state, now=NOW + 100)
    assert gone.health is Health.FAILING


def test_peers_that_answered_say_what_the_model_is() -> None:
    liars = [
        make_announcement(number, num_blocks=1, span=Span(0, 1), model_name="evil/name")
        for number in (3, 4, 5)
    ]
    state, _ = reduce_reading(SwarmState(), MODEL, [*HALVES, *liars], NOW)
    assert state.models[MODEL].num_blocks == 1

    for peer_id in (FIRST, SECOND):
        state = probe(state, peer_id, "")

    assert (state.models[MODEL].num_blocks, state.models[MODEL].depths) == (8, (1,) * 8)


def test_model_whose_peers_are_not_told_is_unknown_and_so_is_the_swarm() -> None:
    whole = [make_announcement(number, span=Span(0, 8)) for number in (1, 2)]
    other = ModelId("b" * 32)

    state, _ = reduce_failure(read(*whole), "nobody answers", other)

    assert (state.models[MODEL].health, state.models[other].health) == (
        Health.HEALTHY,
        Health.UNKNOWN,
    )
    assert (state.health, state.error) == (Health.UNKNOWN, "")
    state, _ = reduce_failure(state, "nobody answers", MODEL)
    assert state.models[MODEL].health is Health.UNKNOWN  # though its peers are known
    assert read(*whole, state=state).models[MODEL].health is Health.HEALTHY


def test_newcomer_and_losses_are_imagined_from_announcements_of_any_age() -> None:
    model = read(*HALVES).models[MODEL]
    asked = list[SwarmView]()

    def choose(view: SwarmView, num_blocks: int) -> Span | None:
        asked.append(view)
        return Span(0, num_blocks)

    assert imagine_newcomer(model, 3, NOW + 1000, choose) == Span(0, 3)
    assert len(asked[0].online) == 2
    outcome = imagine_loss(model, [FIRST[-5:], "nobody"])
    assert (outcome.model.depths, outcome.unknown) == ((0, 0, 0, 0, 1, 1, 1, 1), ("nobody",))


def test_size_of_a_block_is_what_most_peers_say_that_say_it() -> None:
    sizes = (0, 0, 0, 200, 200, 400)
    told = [make_announcement(n, block_bytes=size) for n, size in enumerate(sizes, 1)]

    assert find_block_bytes(read(*told).models[MODEL]) == 200
    assert find_block_bytes(read(*told[:3]).models[MODEL]) is None


def test_peer_that_nobody_tells_of_is_lost_when_its_announcement_expires() -> None:
    state = read(*HALVES)

    assert list_kinds(state, HALVES[1], now=NOW + 89) == []
    assert list_kinds(state, now=NOW + 91) == [EventKind.LOST, EventKind.LOST]


def test_clock_that_is_off_costs_a_dial_and_no_more() -> None:
    ahead = make_announcement(1, now=NOW + 25)
    behind = make_announcement(2, now=NOW - 60)

    state = read(ahead, behind, state=read(ahead, behind), now=NOW + 20)

    peers = state.models[MODEL].peers
    assert peers[FIRST].visibility is Visibility.SEEN
    assert peers[SECOND].visibility is Visibility.NOT_SEEN
    state, events = reduce_probe(state, MODEL, SECOND, ProbeResult(NOW + 21))
    assert (state.models[MODEL].peers[SECOND].visibility, events) == (Visibility.SEEN, ())


def test_departed_peers_are_forgotten_in_the_end() -> None:
    state = read(state=read(*HALVES), now=NOW + 100)
    assert len(state.models[MODEL].peers) == 2

    assert read(state=state, now=NOW + 4000).models == {}  # and their model with them


def test_depths_are_those_of_counting_each_block() -> None:
    print("seed 21")
    rng = random.Random(21)
    for _ in range(20):
        spans = [Span(start, rng.randint(start + 1, 8)) for start in rng.choices(range(8), k=5)]
        peers = [make_announcement(n, span=span) for n, span in enumerate(spans, 1)]

        depths = read(*peers).models[MODEL].depths

        assert depths == tuple(sum(block in span for span in spans) for block in range(8))


def test_dialled_peer_that_is_not_known_changes_nothing() -> None:
    state = read(HALVES[0])

    assert reduce_probe(state, MODEL, SECOND, ProbeResult(NOW)) == (state, ())


def test_made_up_peers_make_no_events() -> None:
    fake = make_announcement(3)
    state, events = reduce_reading(read(*HALVES), MODEL, [*HALVES, fake], NOW + 1)
    late, more = reduce_reading(state, MODEL, [*HALVES, fake], NOW + 40)
    closed = ProbeResult(NOW + 41, "closed port")

    lost, others = reduce_probe(late, MODEL, fake.peer_id, closed)

    assert (*events, *more, *others) == ()
    assert lost.models[MODEL].peers[fake.peer_id].visibility is Visibility.LOST


def test_ten_thousand_made_up_peers_change_no_health_and_take_a_bounded_room() -> None:
    peer_ids = (PeerId(f"{number:052}") for number in range(10_000))
    whole = make_announcement(span=Span(0, 8))
    made_up = [replace(whole, peer_id=peer_id) for peer_id in peer_ids]

    state, events = reduce_reading(read(*HALVES), MODEL, [*HALVES, *made_up], NOW + 1)

    assert (state.health, len(state.models[MODEL].peers), events) == (Health.DEGRADED, 10_002, ())
    (shown,) = make_view(describe(state, NOW + 1))["models"]
    assert (len(shown["peers"]), shown["num_hidden"]) == (1000, 9002)
    assert {peer["id"] for peer in shown["peers"][:2]} == {FIRST, SECOND}  # those that answer
    assert len(json.dumps(shown)) < 2**20
    state, events = reduce_reading(state, MODEL, [], NOW + 100)
    assert len(state.models[MODEL].peers) == MOST_DEPARTED
    assert len(events) == 2


def test_goodbye_of_a_peer_that_was_never_seen_is_no_news() -> None:
    gone = make_announcement(3, state=PeerState.OFFLINE)

    state, events = reduce_reading(read(*HALVES), MODEL, [*HALVES, gone], NOW + 1)

    assert (len(state.models[MODEL].peers), events) == (2, ())


def test_run_has_come_as_far_as_half_of_its_peers_say() -> None:
    told = [
        TrainingProgress(12, 400, 4.5),
        TrainingProgress(13, 400, 4.25, 4.375),
        TrainingProgress(399, 400, 0.1),
    ]
    peers = [make_announcement(n, training=one) for n, one in enumerate(told, 1)]

    described = describe(read(*peers), NOW)

    assert described.models[0].training == told[1]
    assert make_view(described)["models"][0]["progress"] == (
        "Update 13 of 400, loss 4.25 nats per token, held-out loss 4.375"
    )
    assert json.loads(described.to_json())["models"][0]["training"]["update"] == 13


def test_model_is_no_run_because_one_peer_says_so() -> None:
    liar = make_announcement(3, training=TrainingProgress(1, 2, 3.0))

    (panel,) = describe(read(*HALVES, liar), NOW).models

    assert (panel.training, panel.progress) == (None, "")
