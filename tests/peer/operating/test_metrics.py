"""Metrics of a peer, read back by Prometheus' own parser."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from announcements import MODEL, identity_of, make_announcement
from operated_figures import RUN, UPDATE, make_figures, make_run_figures
from prometheus_client.parser import text_string_to_metric_families
from service_scene import (
    Peer,
    assert_declined,
    draw_hidden,
    expect_output,
    make_open,
    make_step,
    with_peer,
)
from virtual_time import VirtualClock

from shoal.peer.engine.compute_thread import ComputeCounts
from shoal.peer.operating.figures import (
    Figures,
    Replicas,
    count_replicas,
    read_figures,
)
from shoal.peer.operating.http_server import listen
from shoal.peer.operating.metrics import MEASURED, write_metrics
from shoal.peer.operating.operation import OperatingConfig, Operation
from shoal.peer.operating.operator_config import OperatorConfig
from shoal.peer.operating.run_figures import RunFigures
from shoal.peer.process.config import PeerEvent
from shoal.peer.process.pauses import ServingPauses
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.errors import ErrorCode, UsageError
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read_back(figures: Figures) -> Samples:
    return read_samples(write_metrics(figures, RunFigures()).decode())


def find(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[f"shoal_peer_{name}", frozenset(labels.items())]


def test_peer_without_blocks_has_counters_at_zero_and_no_figures_of_sessions() -> None:
    samples = read_back(make_figures())

    assert find(samples, "state", state="joining") == 1
    assert find(samples, "state", state="online") == 0
    assert find(samples, "blocks") == find(samples, "sessions_opened_total") == 0
    assert find(samples, "refusals_total", reason="cache_full") == 0
    assert find(samples, "loop_lag_seconds") == 0.25
    assert find(samples, "sent_bytes_total", purpose="training") == 0
    assert not {name for name, _ in samples} & {"shoal_peer_sessions", "shoal_peer_replicas_min"}
    assert samples["process_resident_memory_bytes", frozenset()] > 0


def test_counts_are_labelled_and_histograms_add_up() -> None:
    figures = make_figures()
    figures.service.refusals = Counter({ErrorCode.BUSY: 3})
    for seconds in (0.0005, 0.001, 0.7, 60.0):
        figures.compute.queue_seconds.note(seconds)
    figures.compute.rows.note(3)

    samples = read_back(replace(figures, span=Span(2, 5), replicas=Replicas(1, 2)))

    assert find(samples, "refusals_total", reason="busy") == 3
    assert (find(samples, "blocks"), find(samples, "replicas_min")) == (3, 1)
    assert find(samples, "blocks_alone") == 2
    for bound, number in {"0.001": 2, "0.5": 2, "1.0": 3, "5.0": 3, "+Inf": 4}.items():
        assert find(samples, "step_queue_seconds_bucket", le=bound) == number
    assert find(samples, "step_queue_seconds_count") == 4
    assert find(samples, "step_queue_seconds_sum") == pytest.approx(60.7015)
    assert find(samples, "iteration_rows_bucket", le="4.0") == 1
    assert find(samples, "iteration_rows_bucket", le="2.0") == 0


def test_replicas_are_counted_at_the_own_blocks_with_peers_that_serve() -> None:
    own = identity_of(1).peer_id
    announced = [
        make_announcement(1, span=Span(2, 6)),
        make_announcement(2, span=Span(0, 4)),
        make_announcement(3, span=Span(3, 8)),
        make_announcement(4, span=Span(2, 6), state=PeerState.DRAINING),
    ]

    assert count_replicas(Span(2, 6), own, announced) == Replicas(least=2, single=0)
    assert count_replicas(Span(2, 6), own, announced[:2]) == Replicas(least=1, single=2)


@with_peer()
async def test_figures_of_a_peer_at_work(peer: Peer) -> None:
    talk = await peer.open(num_rows=2)
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, 2, 5))))
    expect_output(await talk.ask(make_step(2, 5, draw_hidden(2, 2, 1))))
    assert_declined(await talk.ask(make_open(2, model_id=ModelId("b" * 32))), ErrorCode.WRONG_MODEL)
    await talk.ask(make_open(3, epoch=2))
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(3, 1, 4), 3, epoch=2)))

    figures = read_figures(peer.service.peer, VirtualClock())
    samples = read_back(figures)

    assert set(figures.measured) == set(MEASURED)
    assert find(samples, "sessions") == find(samples, "sessions_opened_total") == 2
    # The second one began elsewhere: this is its second route.
    assert find(samples, "sessions_taken_over_total") == 1
    assert find(samples, "tokens_total", kind="prefill") == 2 * 5 + 4
    assert find(samples, "tokens_total", kind="decode") == 2
    assert find(samples, "prefill_seconds_total") > 0
    assert find(samples, "step_seconds_count") == 1
    assert find(samples, "iteration_rows_sum") == 5
    assert find(samples, "refusals_total", reason="wrong_model") == 1
    assert find(samples, "kv_used_bytes") == await peer.count_used_bytes() > 0
    for direction in ("received", "sent"):
        assert find(samples, f"{direction}_bytes_total", purpose="sessions") > 1000
        assert find(samples, f"{direction}_bytes_total", purpose="training") == 0
    sent_bytes, received_bytes = figures.service.count_traffic()
    assert min(sent_bytes, received_bytes) > 1000
    assert find(samples, "replicas_min") == find(samples, "directory_records") == 1
    assert find(samples, "blocks_alone") == find(samples, "blocks") == len(peer.engine.span)


def test_run_is_told_by_its_events_with_the_frames_of_a_peer_that_only_trains() -> None:
    counts = ServiceCounts()
    counts.received_bytes = Counter({"runs": 500})

    before = read_samples(write_metrics(counts, RunFigures()).decode())
    samples = read_samples(write_metrics(counts, make_run_figures()).decode())

    assert not {name for name, _ in before if name.startswith("shoal_peer_run")}
    assert find(before, "received_bytes_total", purpose="runs") == 500
    assert "shoal_peer_state" not in {name for name, _ in samples}
    assert find(samples, "run_info", name="stories", owner="12D3", run_id="993747e6") == 1
    assert (find(samples, "run_update"), find(samples, "run_updates")) == (7, 30)
    assert (find(samples, "run_loss"), find(samples, "run_held_out_loss")) == (5.5, 5.75)
    assert find(samples, "run_tokens_total") == 7 * 64
    assert find(samples, "run_parts_total") == 7 * 4
    assert find(samples, "run_parts_redone_total") == 3  # not those of its state once more
    assert find(samples, "run_averaging_seconds_count") == 2
    assert find(samples, "run_averaging_seconds_sum") == pytest.approx(0.5)
    # By the last event that tells it, which need not be an update.
    assert [find(samples, "run_replicas", stage=stage) for stage in ("0", "1")] == [2, 1]
    assert find(samples, "run_queue_seconds", stage="1") == 1.2
    assert find(samples, "run_events_total", kind="member_left") == 1
    assert find(samples, "run_events_total", kind="put_aside") == 0


def test_run_that_has_not_begun_has_no_loss_and_one_that_has_stopped_has_no_metrics() -> None:
    run = RunFigures()
    run.note(PeerEvent("training", RUN))
    run.note(PeerEvent("update", {**UPDATE, "update": 0, "loss": 0.0}))

    begun = read_samples(write_metrics(ServiceCounts(), run).decode())
    run.note(PeerEvent("training_stopped", {"why": "another machine"}))
    stopped = read_samples(write_metrics(ServiceCounts(), run).decode())

    assert find(begun, "run_update") == find(begun, "run_averaging_seconds_count") == 0
    assert "shoal_peer_run_loss" not in {name for name, _ in begun}
    assert run.progress == {}
    assert not [name for name, _ in stopped if name.startswith("shoal_peer_run")]


async def ask(port: int, host: str = "localhost", path: str = "/metrics") -> tuple[str, str]:
    """Return the status line and the body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


async def scrape(port_of: list[int]) -> dict[str, tuple[str, str]]:
    """Serve the metrics of a peer that does nothing; return the answers to several questions."""
    records = SimpleNamespace(list_current=lambda model_id, now: [])
    peer = SimpleNamespace(
        announcer=SimpleNamespace(peer_id=identity_of(1).peer_id, state=PeerState.JOINING),
        joined=SimpleNamespace(
            handler=SimpleNamespace(service=None, counts=ServiceCounts()),
        ),
        loader=SimpleNamespace(
            counts=ComputeCounts(),
            model=SimpleNamespace(model_id=MODEL, spec=SimpleNamespace(num_blocks=8)),
        ),
        directory=SimpleNamespace(records=records),
        lag=SimpleNamespace(mean_seconds=0.0, max_seconds=0.0),
        loop=SimpleNamespace(pauses=ServingPauses()),
    )
    events = list[PeerEvent]()
    config = OperatingConfig(("127.0.0.1", 0), OperatorConfig(has_socket=False))
    with Operation.prepare(config) as operation:
        async with operation.run(peer, SystemClock(), events.append):  # type: ignore[arg-type]
            url = str(events[0].facts["url"])
            port = int(url.removesuffix("/metrics").rpartition(":")[2])
            port_of.append(port)
            return {
                "metrics": await ask(port),
                "rebound": await ask(port, host="evil.example"),
                "elsewhere": await ask(port, path="/"),
            }


def test_metrics_are_served_under_the_names_of_this_machine() -> None:
    ports = list[int]()

    answers = asyncio.run(scrape(ports))

    status, body = answers["metrics"]
    assert status == "HTTP/1.1 200 OK"
    assert find(read_samples(body), "state", state="joining") == 1
    assert answers["rebound"][0].startswith("HTTP/1.1 400")
    assert answers["elsewhere"][0].startswith("HTTP/1.1 404")
    with listen("127.0.0.1", ports[0], "--metrics"):  # it has let go of it
        pass


def test_port_that_is_taken_is_told_with_the_option() -> None:
    with listen("127.0.0.1", 0, "--metrics") as taken:
        port = taken.getsockname()[1]
        config = OperatingConfig(metrics=("127.0.0.1", port))

        with (
            pytest.raises(
                UsageError, match=rf"at 127.0.0.1:{port}: Address already in use; .*--metr"
            ),
            Operation.prepare(config),
        ):
            raise AssertionError
