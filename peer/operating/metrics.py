"""The figures of a peer as Prometheus metrics.

Names and units follow https://prometheus.io/docs/practices/naming/. Counters begin at 0 when the
peer is started and go on when it moves to other blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
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
from ..streams.stream_host import PURPOSES
from .figures import Figures

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

PUSHED = "pushed_bytes"
"""The one thing that they count: it is sent on streams that the peer has opened."""

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
        yield from self._count()
        yield from self._distribute()
        yield from _PROCESS.collect()

    def _count(self) -> Iterable[Metric]:
        service, compute = self._figures.service, self._figures.compute
        purposes = dict.fromkeys(PURPOSES.values())
        received = {purpose: service.received_bytes[purpose] for purpose in purposes}
        sent = {purpose: service.sent_bytes[purpose] for purpose in purposes}
        sent["pushes"] = int(self._figures.measured.get(PUSHED, 0))
        tokens = {"decode": compute.num_decode_tokens, "prefill": compute.num_prefill_tokens}
        refusals = {code.name.lower(): service.refusals[code] for code in ErrorCode}
        for name, help_text, label, counts in (
            ("shoal_peer_received_bytes", "Bytes of frames received", "purpose", received),
            ("shoal_peer_sent_bytes", "Bytes of frames sent", "purpose", sent),
            ("shoal_peer_tokens", "Tokens computed, times rows", "kind", tokens),
            ("shoal_peer_refusals", "What was declined, by its code", "reason", refusals),
        ):
            family = CounterMetricFamily(name, help_text, labels=[label])
            for value, number in counts.items():
                family.add_metric([value], number)
            yield family

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


def write_metrics(figures: Figures) -> bytes:
    """Return the figures in Prometheus' text format, with those of the process."""
    return generate_latest(_Read(figures))


def make_metrics_page(read: Callable[[], Figures], hosts: Sequence[str]) -> Starlette:
    """Return an ASGI application with the metrics of a peer at `/metrics`.

    It answers to the names of `hosts` only, see TrustedHostMiddleware.
    """

    async def send_metrics(request: Request) -> Response:
        # Writing takes longer than all else of a scrape, and steps should not wait for it.
        text = await asyncio.to_thread(write_metrics, read())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/metrics", send_metrics)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
        ],
    )
