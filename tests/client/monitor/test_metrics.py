"""Metrics of a swarm, read back by Prometheus' own parser."""

from __future__ import annotations

from announcements import MODEL, NOW, make_announcement
from prometheus_client.parser import text_string_to_metric_families
from watched_swarms import read

from shoal.client.monitor.description import describe
from shoal.client.monitor.page.metrics import write_metrics
from shoal.client.monitor.state import EventKind, SwarmState, reduce_failure, reduce_reading
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
OF_MODEL = {"model_id": MODEL, "model": "org/model"}


def read_samples(state: SwarmState, num_events: dict[EventKind, int]) -> Samples:
    text = write_metrics(describe(state, NOW + 7), num_events).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def find(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_metrics_tell_health_blocks_and_peers() -> None:
    peers = [
        make_announcement(1, model_name="org/model", free_kv_tokens=30),
        make_announcement(2, model_name="org/model", free_kv_tokens=12, span=Span(2, 6)),
        make_announcement(3, model_name="org/model", state=PeerState.DRAINING),
    ]
    state, _ = reduce_reading(read(*peers), MODEL, [*peers, make_announcement(4)], NOW)

    samples = read_samples(state, {EventKind.LOST: 4})

    assert find(samples, "shoal_swarm_health") == 2
    assert find(samples, "shoal_swarm_directory_age_seconds") == 7
    assert find(samples, "shoal_swarm_events_total", kind="lost") == 4
    assert find(samples, "shoal_swarm_events_total", kind="joined") == 0
    expected = {"health": 2, "blocks": 8, "blocks_missing": 2, "blocks_single": 4}
    expected |= {"replicas_min": 0, "free_kv_tokens": 42}
    for name, number in expected.items():
        assert find(samples, f"shoal_model_{name}", **OF_MODEL) == number
    assert find(samples, "shoal_model_peers", state="online", **OF_MODEL) == 2
    assert find(samples, "shoal_model_peers", state="unconfirmed", **OF_MODEL) == 1
    assert find(samples, "shoal_model_peers", state="draining", **OF_MODEL) == 1
    assert find(samples, "shoal_model_peers", state="lost", **OF_MODEL) == 0


def test_silent_directory_is_unknown_and_has_no_age_before_its_first_answer() -> None:
    state, _ = reduce_failure(SwarmState(), "nobody answers")

    samples = read_samples(state, {})

    assert find(samples, "shoal_swarm_health") == 3
    assert ("shoal_swarm_directory_age_seconds", frozenset()) not in samples
