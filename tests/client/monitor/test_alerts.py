"""Which changes of a swarm are told as alerts, and which are no news."""

from __future__ import annotations

from announcements import MODEL, NOW, make_announcement
from watched_swarms import read

from shoal.client.monitor.alerts import find_alerts
from shoal.client.monitor.state import (
    EventKind,
    Health,
    ProbeResult,
    SwarmState,
    reduce_failure,
    reduce_probe,
    reduce_reading,
)
from shoal.protocol.spans import Span

BOTH = [make_announcement(number, span=Span(0, 8), model_name="org/model") for number in (1, 2)]
ONE = make_announcement(1, span=Span(0, 8), model_name="org/model")


def list_kinds(*states: SwarmState) -> list[str]:
    known, kinds = {}, list[str]()
    for state in states:
        known, alerts = find_alerts(known, state, (), NOW)
        kinds += (alert.kind for alert in alerts)
    return kinds


def test_health_is_told_when_it_changes() -> None:
    healthy, degraded = read(*BOTH), read(ONE)
    half = read(make_announcement(1))

    assert list_kinds(healthy, healthy) == []
    assert list_kinds(degraded, degraded) == ["model degraded"]
    assert list_kinds(healthy, half, degraded, healthy) == [
        "model failing",
        "model degraded",
        "model healthy",
    ]


def test_what_is_not_known_is_no_news() -> None:
    healthy, degraded = read(*BOTH), read(ONE)
    silent, _ = reduce_failure(degraded, "nobody answers")
    made_up, _ = reduce_reading(SwarmState(), MODEL, [ONE], NOW)

    assert list_kinds(degraded, silent, degraded) == ["model degraded"]
    assert list_kinds(made_up, made_up) == []
    assert list_kinds(degraded, silent, healthy) == ["model degraded", "model healthy"]


def test_alert_names_the_model_and_its_blocks() -> None:
    _, (alert,) = find_alerts({MODEL: Health.HEALTHY}, read(ONE), (), NOW)

    assert (alert.model_id, alert.model, alert.kind) == (MODEL, "org/model", "model degraded")
    assert alert.text == "org/model is degraded: blocks 0:8 have one peer."


def test_lost_peer_is_told_where_it_was_alone() -> None:
    for announced, kinds in ([[ONE], ["model failing", "peer lost"]], [BOTH, ["model degraded"]]):
        late, _ = reduce_reading(read(*announced), MODEL, announced, NOW + 40)
        result = ProbeResult(NOW + 41, "closed port")
        state, events = reduce_probe(late, MODEL, ONE.peer_id, result)
        assert [event.kind for event in events] == [EventKind.LOST]

        _, alerts = find_alerts({MODEL: Health.HEALTHY}, state, events, NOW + 41)

        assert [alert.kind for alert in alerts] == kinds


def test_peer_that_was_dialled_in_vain_before_it_was_late_is_told_as_lost() -> None:
    state, now = read(ONE), NOW
    for now in (NOW + 20, NOW + 21):
        state, _ = reduce_probe(state, MODEL, ONE.peer_id, ProbeResult(now, "closed port"))
    told, alerts = find_alerts({MODEL: Health.HEALTHY}, state, (), now)
    assert [alert.kind for alert in alerts] == ["model failing"]
    late, _ = reduce_reading(state, MODEL, [ONE], NOW + 40)

    state, events = reduce_probe(late, MODEL, ONE.peer_id, ProbeResult(NOW + 41, "closed port"))

    assert [alert.kind for alert in find_alerts(told, state, events, NOW + 41)[1]] == ["peer lost"]


def test_made_up_peer_that_is_lost_is_no_news() -> None:
    state, _ = reduce_reading(SwarmState(), MODEL, [ONE], NOW)
    state, events = reduce_reading(state, MODEL, [], NOW + 100)

    assert find_alerts({}, state, events, NOW + 100) == ({}, [])
