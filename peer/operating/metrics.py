"""The figures of a peer as Prometheus metrics.

Names and units follow https://prometheus.io/docs/practices/naming/. Counters begin at 0 when the
peer is started and go on when it moves to other blocks; those of a training run that tell how far
that has come are the same at all of its peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...protocol.errors import ErrorCode
from ...protocol.records.announcements import PeerState
from ...protocol.versions import SOFTWARE
from ..streams.stream_host import PURPOSES, PUSHES, ServiceCounts
from .figures import Figures
from .run_figures import RunFigures

MEASURED = {
    "streams": ("shoal_peer_streams", "Open streams of clients and peers"),
    "pending_bytes": ("shoal_peer_pending_bytes", "Memory of frames, steps and answers that wait"),
    "sessions": ("shoal_peer_sessions", "Sessions that the peer holds"),
    "sessions_waiting": ("shoal_peer_sessions_waiting", "Sessions that wait for room"),
    "kv_used_bytes": ("shoal_peer_kv_used_bytes", "KV memory that sessions have committed"),
    "kv_budget_bytes": ("shoal_peer_kv_budget_bytes", "KV memory for all sessions"),
    "kv_free_tokens": ("shoal_peer_kv_free_tokens", "Tokens that a new client could cache"),
    "queue_seconds": ("shoal_peer_queue_seconds", "Estimated wait of one more step"),
    "passes": ("shoal_peer_passes", "Fine-tuning passes and updates under way"),
    "pass_queue_seconds": ("shoal_peer_pass_queue_seconds", "Estimated wait of one more pass"),
    "training_used_bytes": ("shoal_peer_training_used_bytes", "Memory of tensors of passes"),
    "training_budget_bytes": ("shoal_peer_training_budget_bytes", "Memory for passes"),
    "adapters": ("shoal_peer_adapters", "Adapters that the peer keeps"),
    "adapter_used_bytes": ("shoal_peer_adapter_used_bytes", "Memory of adapters"),
    "adapter_budget_bytes": ("shoal_peer_adapter_budget_bytes", "Memory for adapters"),
    "weight_bytes": ("shoal_peer_weight_bytes", "Memory of the blocks' weights"),
}
"""What workloads measure: name and help of its gauge."""

_GAUGES: Mapping[str, tuple[str, Callable[[Figures], float | None]]] = {
    "shoal_peer_blocks": (
        "Blocks that the peer serves",
        lambda figures: 0 if figures.span is None else len(figures.span),
    ),
    "shoal_peer_replicas_min": (
        "Peers, this one included, at the block of its own that fewest serve",
        lambda figures: None if figures.replicas is None else figures.replicas.least,
    ),
    "shoal_peer_blocks_alone": (
        "Blocks that nobody else serves",
        lambda figures: None if figures.replicas is None else figures.replicas.single,
    ),
    "shoal_peer_directory_records": (
        "Announcements of this model's peers that hold",
        lambda figures: figures.num_announcements,
    ),
    "shoal_peer_loop_lag_seconds": (
        "How late the event loop wakes, average of some seconds",
        lambda figures: figures.loop_lag_seconds,
    ),
    "shoal_peer_loop_lag_max_seconds": (
        "How late it has woken at most",
        lambda figures: figures.loop_lag_max_seconds,
    ),
}

_COUNTERS: Mapping[str, tuple[str, Callable[[Figures], float]]] = {
    "shoal_peer_sessions_opened": (
        "Sessions that were opened",
        lambda figures: figures.service.num_opened,
    ),
    "shoal_peer_sessions_taken_over": (
        "Sessions that began on another route: a peer has failed, left, or refused them",
        lambda figures: figures.service.num_taken_over,
    ),
    "shoal_peer_prefill_seconds": (
        "Computing time of steps of several tokens",
        lambda figures: figures.compute.prefill_seconds,
    ),
    "shoal_peer_passes_computed": (
        "Fine-tuning passes that were computed",
        lambda figures: figures.compute.num_passes,
    ),
}

# Before its first update, a run has a loss of 0.
_RUN_GAUGES: Mapping[str, tuple[str, Callable[[RunFigures], float | None]]] = {
    "shoal_peer_run_updates": (
        "Updates of the whole training run",
        lambda run: run.described["num_updates"],
    ),
    "shoal_peer_run_update": (
        "Updates of the run that the peer has applied",
        lambda run: run.newest.get("update"),
    ),
    "shoal_peer_run_stage": (
        "Stage of the run that the peer holds",
        lambda run: run.newest.get("stage"),
    ),
    "shoal_peer_run_loss": (
        "Loss of the last update in nats per token",
        lambda run: run.newest.get("loss") or None,
    ),
    "shoal_peer_run_gradient_norm": (
        "Norm of the gradient of the last update",
        lambda run: run.newest.get("gradient_norm") or None,
    ),
    "shoal_peer_run_held_out_loss": (
        "Loss on held-out text, where it was measured last, in nats per token",
        lambda run: run.held_out_loss,
    ),
}

_RUN_COUNTERS: Mapping[str, tuple[str, Callable[[RunFigures], float]]] = {
    "shoal_peer_run_tokens": (
        "Tokens of all updates of the run that the peer has applied",
        lambda run: run.newest["update"] * run.described["tokens_per_update"],
    ),
    "shoal_peer_run_parts": (
        "Parts of these updates, each of which counts once",
        lambda run: run.newest["update"] * run.described["parts_per_update"],
    ),
    "shoal_peer_run_parts_redone": (
        "Parts that a stage had counted, lost, and computed again",
        lambda run: run.num_parts_redone,
    ),
}

_PROCESS = ProcessCollector(registry=None)
"""Time, memory and files of the process, as all exporters name them."""


class _Read(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        figures = self._figures
        labels = {
            "peer_id": figures.peer_id, "model_id": figures.model_id, "software": SOFTWARE,
        }  # fmt: skip
        yield InfoMetricFamily("shoal_peer", "Who this peer is", value=labels)
        state = GaugeMetricFamily(
            "shoal_peer_state", "1 for the state that the peer announces", labels=["state"]
        )
        for one in PeerState:
            state.add_metric([str(one)], one is figures.state)
        yield state
        for name, (help_text, read) in _GAUGES.items():
            if (value := read(figures)) is not None:
                yield GaugeMetricFamily(name, help_text, value=value)
        for key, (name, help_text) in MEASURED.items():
            if key in figures.measured:
                yield GaugeMetricFamily(name, help_text, value=figures.measured[key])
        for name, (help_text, count) in _COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=count(figures))
        compute = figures.compute
        tokens = {"decode": compute.num_decode_tokens, "prefill": compute.num_prefill_tokens}
        yield _count("shoal_peer_tokens", "Tokens computed, times rows", "kind", tokens)
        yield from _count_frames(figures.service)
        yield from self._distribute()

    def _distribute(self) -> Iterable[Metric]:
        compute = self._figures.compute
        for name, help_text, counted in (
            ("shoal_peer_step_seconds", "Computing time of decode steps", compute.decode_seconds),
            ("shoal_peer_step_queue_seconds", "Waiting time of steps", compute.queue_seconds),
            ("shoal_peer_iteration_rows", "Rows computed together", compute.rows),
        ):
            number, buckets = 0, list[tuple[str, float]]()
            bounds = *map(str, counted.bounds), "+Inf"
            for bound, count in zip(bounds, counted.counts, strict=True):
                number += count
                buckets.append((bound, number))
            yield HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=counted.total)


class _ReadRun(Collector):
    def __init__(self, run: RunFigures) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics of the run, if there is one."""
        run = self._run
        if not run.described:
            return
        labels = {name: run.described[name] for name in ("name", "owner", "run_id")}
        yield InfoMetricFamily("shoal_peer_run", "The training run of the peer", value=labels)
        for name, (help_text, read) in _RUN_GAUGES.items():
            if (value := read(run)) is not None:
                yield GaugeMetricFamily(name, help_text, value=value)
        if not run.newest:
            return
        for name, (help_text, count) in _RUN_COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=count(run))
        events = "Events of the run at this peer; the peer that leads sees most of them"
        yield _count("shoal_peer_run_events", events, "kind", run.num_events)
        yield SummaryMetricFamily(
            "shoal_peer_run_averaging_seconds",
            "Time until the gradients of an update were averaged",
            count_value=run.num_averaged,
            sum_value=run.averaging_seconds,
        )
        for name, help_text, numbers in (
            ("shoal_peer_run_replicas", "Peers of a stage", run.members_per_stage),
            (
                "shoal_peer_run_queue_seconds",
                "How long a part lately waited at a stage for its turns",
                run.newest["queue_seconds"],
            ),
        ):
            family = GaugeMetricFamily(name, help_text, labels=["stage"])
            for stage, number in enumerate(numbers):
                family.add_metric([str(stage)], number)
            yield family


class _ReadFrames(Collector):
    def __init__(self, counts: ServiceCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of frames."""
        yield from _count_frames(self._counts)


def _count_frames(counts: ServiceCounts) -> Iterable[Metric]:
    purposes = dict.fromkeys(PURPOSES.values())
    received = {purpose: counts.received_bytes[purpose] for purpose in purposes}
    sent = {purpose: counts.sent_bytes[purpose] for purpose in (*purposes, PUSHES)}
    refusals = {code.name.lower(): counts.refusals[code] for code in ErrorCode}
    yield _count("shoal_peer_received_bytes", "Bytes of frames received", "purpose", received)
    yield _count("shoal_peer_sent_bytes", "Bytes of frames sent", "purpose", sent)
    yield _count("shoal_peer_refusals", "What was declined, by its code", "reason", refusals)


def _count(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, number in counts.items():
        family.add_metric([value], number)
    return family


def write_metrics(figures: Figures | ServiceCounts, run: RunFigures) -> bytes:
    """Return figures in Prometheus' text format, with those of the process.

    They are those of a peer that serves, or the counts of one that only trains; and its run.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(figures) if isinstance(figures, Figures) else _ReadFrames(figures))
    registry.register(_ReadRun(run))
    registry.register(_PROCESS)
    return generate_latest(registry)


def make_metrics_page(
    read: Callable[[], Figures | ServiceCounts], run: RunFigures, hosts: Sequence[str]
) -> Starlette:
    """Return an ASGI application with the metrics of a peer at `/metrics`; see `write_metrics`.

    It answers to the names of `hosts` only, see TrustedHostMiddleware.
    """

    async def send_metrics(request: Request) -> Response:
        # Writing takes longer than all else of a scrape, and steps should not wait for it.
        text = await asyncio.to_thread(write_metrics, read(), copy(run))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/metrics", send_metrics)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
        ],
    )
