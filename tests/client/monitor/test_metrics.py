"""Metrics of a swarm, read back by Prometheus' own parser."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from announcements import MODEL, NOW, make_announcement
from prometheus_client.parser import text_string_to_metric_families
from watched_swarms import read

from shoal.client.monitor.canary import CanaryHop, CanaryRun, CanaryState
from shoal.client.monitor.description import describe, describe_canaries
from shoal.client.monitor.page.metrics import write_metrics
from shoal.client.monitor.state import EventKind, SwarmState, reduce_failure, reduce_reading
from shoal.protocol.ids import PeerId
from shoal.protocol.records.announcements import PeerState, TrainingProgress
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


@pytest.mark.parametrize("held_out", [None, 4.75])
def test_metrics_tell_how_far_a_run_has_come(held_out: float | None) -> None:
    progress = TrainingProgress(12, 400, 4.5, held_out)

    samples = read_samples(read(make_announcement(training=progress, model_name="org/model")), {})

    for name, number in {"update": 12, "updates": 400, "loss": 4.5}.items():
        assert find(samples, f"shoal_run_{name}", **OF_MODEL) == number
    told = [value for (name, _), value in samples.items() if name == "shoal_run_held_out_loss"]
    assert told == [one for one in (held_out,) if one is not None]


def test_metrics_of_canaries_name_no_peers() -> None:
    hop = CanaryHop(PeerId("12D3Koo"), "0:4", 0.001, 0.02, 0.003)
    good = CanaryRun(NOW, MODEL, "", 0.5, 9.0, "text", (hop,))
    states = [CanaryState("a", "text", good, 3, 1), CanaryState("b")]
    failed = CanaryState("c", None, CanaryRun(NOW, MODEL, "no peer"), 1, 1)
    canaries = describe_canaries([*states, failed], NOW + 7)

    described = replace(describe(SwarmState(), NOW + 7), canaries=canaries)
    text = write_metrics(described, {}).decode()

    lines = [line for line in text.splitlines() if line.startswith("shoal_monitor_canary")]
    assert set(lines) == {
        'shoal_monitor_canary_up{model="a"} 1.0',
        'shoal_monitor_canary_up{model="c"} 0.0',
        'shoal_monitor_canary_age_seconds{model="a"} 7.0',
        'shoal_monitor_canary_age_seconds{model="c"} 7.0',
        'shoal_monitor_canary_first_token_seconds{model="a"} 0.5',
        'shoal_monitor_canary_tokens_per_second{model="a"} 9.0',
        'shoal_monitor_canary_same_text{model="a"} 1.0',
        'shoal_monitor_canary_runs_total{model="a",result="failed"} 1.0',
        'shoal_monitor_canary_runs_total{model="a",result="succeeded"} 2.0',
        'shoal_monitor_canary_runs_total{model="b",result="failed"} 0.0',
        'shoal_monitor_canary_runs_total{model="b",result="succeeded"} 0.0',
        'shoal_monitor_canary_runs_total{model="c",result="failed"} 1.0',
        'shoal_monitor_canary_runs_total{model="c",result="succeeded"} 0.0',
        'shoal_monitor_canary_hop_seconds{model="a",part="queue",span="0:4"} 0.001',
        'shoal_monitor_canary_hop_seconds{model="a",part="compute",span="0:4"} 0.02',
        'shoal_monitor_canary_hop_seconds{model="a",part="network",span="0:4"} 0.003',
    }


def test_json_is_what_the_description_holds() -> None:
    described = describe(read(make_announcement(1)), NOW + 1)

    assert json.loads(described.to_json()) == json.loads(json.dumps(asdict(described)))


def test_silent_directory_is_unknown_and_has_no_age_before_its_first_answer() -> None:
    state, _ = reduce_failure(SwarmState(), "nobody answers")

    samples = read_samples(state, {})

    assert find(samples, "shoal_swarm_health") == 3
    assert ("shoal_swarm_directory_age_seconds", frozenset()) not in samples
