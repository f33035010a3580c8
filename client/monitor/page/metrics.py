"""The health of a swarm as Prometheus metrics.

Names and units follow https://prometheus.io/docs/practices/naming/. Peers are counted and not
named: ids come and go, and each would be a time series of its own for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....protocol.records.announcements import TrainingProgress
from ..description import CanaryPanel, Description, ModelPanel
from ..state import EventKind, Health

CONTENT_TYPE = CONTENT_TYPE_LATEST

_STATES = ("joining", "online", "unconfirmed", "draining", "not seen", "lost", "left")


def write_metrics(described: Description, num_events: Mapping[EventKind, int]) -> bytes:
    """Return the state of a swarm in Prometheus' text format.

    `num_events` is how many of each kind were observed since the monitor began.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Described(described, num_events))
    return generate_latest(registry)


class _Described(Collector):
    def __init__(self, described: Description, num_events: Mapping[EventKind, int]) -> None:
        self._described = described
        self._num_events = num_events

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        health = GaugeMetricFamily(
            "shoal_swarm_health", "0 healthy, 1 degraded, 2 failing, 3 unknown"
        )
        health.add_metric([], self._described.exit_code)
        age = GaugeMetricFamily(
            "shoal_swarm_directory_age_seconds", "Seconds since the directory last answered"
        )
        if self._described.age_seconds is not None:
            age.add_metric([], self._described.age_seconds)
        events = CounterMetricFamily(
            "shoal_swarm_events", "Events since the monitor began", labels=["kind"]
        )
        for kind in EventKind:
            events.add_metric([str(kind)], self._num_events.get(kind, 0))
        yield from (health, age, events)
        for name, (help_text, measure) in _OF_MODELS.items():
            family = GaugeMetricFamily(name, help_text, labels=_LABELS)
            for model in self._described.models:
                family.add_metric(_label(model), measure(model))
            yield family
        for name, (help_text, measure_run) in _OF_RUNS.items():
            family = GaugeMetricFamily(name, help_text, labels=_LABELS)
            for model in self._described.models:
                if model.training is not None:
                    number = measure_run(model.training)
                    if number is not None:
                        family.add_metric(_label(model), number)
            yield family
        yield self._count_peers()
        if self._described.canaries:
            yield from self._describe_canaries()

    def _describe_canaries(self) -> Iterable[Metric]:
        for name, (help_text, measure) in _OF_CANARIES.items():
            family = GaugeMetricFamily(f"shoal_monitor_canary_{name}", help_text, labels=["model"])
            for canary in self._described.canaries:
                if (value := measure(canary)) is not None:
                    family.add_metric([canary.name], value)
            yield family
        runs = CounterMetricFamily(
            "shoal_monitor_canary_runs", "Runs since the monitor began", labels=["model", "result"]
        )
        hops = GaugeMetricFamily(
            "shoal_monitor_canary_hop_seconds",
            "Seconds per token at a hop of the last run",
            labels=["model", "span", "part"],
        )
        for canary in self._described.canaries:
            runs.add_metric([canary.name, "failed"], canary.num_failed)
            runs.add_metric([canary.name, "succeeded"], canary.num_runs - canary.num_failed)
            for hop in canary.hops:
                hops.add_metric([canary.name, hop.span, "queue"], hop.queue_seconds)
                hops.add_metric([canary.name, hop.span, "compute"], hop.compute_seconds)
                hops.add_metric([canary.name, hop.span, "network"], hop.network_seconds)
        yield from (runs, hops)

    def _count_peers(self) -> Metric:
        peers = GaugeMetricFamily(
            "shoal_model_peers", "Peers of a model by their state", labels=[*_LABELS, "state"]
        )
        for model in self._described.models:
            states = Counter(peer.state for peer in model.peers)
            for state in _STATES:
                peers.add_metric([*_label(model), state], states[state])
        return peers


_LABELS = ("model_id", "model")

_OF_CANARIES: Mapping[str, tuple[str, Callable[[CanaryPanel], float | None]]] = {
    "up": (
        "1 if the last run succeeded, 0 if it failed",
        lambda canary: None if canary.age_seconds is None else not canary.error,
    ),
    "age_seconds": ("Seconds since the last run began", lambda canary: canary.age_seconds),
    "first_token_seconds": (
        "Seconds to the first token of the last run",
        lambda canary: canary.first_token_seconds,
    ),
    "tokens_per_second": (
        "Tokens per second behind the first one of the last run",
        lambda canary: canary.tokens_per_second,
    ),
    "same_text": ("1 if the last text is that of the first run", lambda canary: canary.is_same),
}

_OF_MODELS: Mapping[str, tuple[str, Callable[[ModelPanel], float]]] = {
    "shoal_model_health": (
        "0 healthy, 1 degraded, 2 failing, 3 unknown",
        lambda model: Health[model.health.upper()],
    ),
    "shoal_model_blocks": ("Blocks of a model", lambda model: model.num_blocks),
    "shoal_model_blocks_missing": (
        "Blocks that no peer serves",
        lambda model: model.depths.count(0),
    ),
    "shoal_model_blocks_single": (
        "Blocks that one peer serves",
        lambda model: model.depths.count(1),
    ),
    "shoal_model_replicas_min": (
        "Peers at the block that fewest serve",
        lambda model: min(model.depths, default=0),
    ),
    "shoal_model_free_kv_tokens": (
        "Free KV tokens of all serving peers",
        lambda model: sum(peer.free_kv_tokens for peer in model.peers),
    ),
}


_OF_RUNS: Mapping[str, tuple[str, Callable[[TrainingProgress], float | None]]] = {
    "shoal_run_update": ("Updates that a training run has applied", lambda run: run.update),
    "shoal_run_updates": ("Updates of the whole training run", lambda run: run.num_updates),
    "shoal_run_loss": ("Loss of the last update in nats per token", lambda run: run.loss),
    "shoal_run_held_out_loss": (
        "Loss on held-out text, where it was measured last, in nats per token",
        lambda run: run.held_out_loss,
    ),
}


def _label(model: ModelPanel) -> list[str]:
    return [model.model_id, model.name]
