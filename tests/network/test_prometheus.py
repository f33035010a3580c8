"""Prometheus over a real swarm: queries of docker/ are answered, and its alerts fire.

Needs Debian's `prometheus`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from container_files import read_yaml
from prometheus_queries import FIRING, Prometheus
from training_runs import write_run

from shoal.peer.local_swarm.swarm import LocalSwarm

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "shoal-stories")
URL = "http://127.0.0.1:19090"
OPTIONS = ("--metrics", "0")
pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus"),
]


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def monitoring(swarm: LocalSwarm, folder: Path) -> Iterator[str]:
    """Run a monitor with a canary; yields its host and port."""
    command = ["monitor", "--listen", "127.0.0.1:0", "--history", f"{folder}/history.sqlite"]
    command += ["--canary", MODEL, "--initial-peers", *swarm.initial_peers]
    with running(sys.executable, "-uPm", "shoal.cli", *command) as process:
        assert process.stdout is not None
        found = re.search(r"http://([\d.:]+)/", process.stdout.readline())
        assert found
        yield found[1]


def write_config(folder: Path, peers: list[str], monitor: str) -> Path:
    """Write the configuration in docker/ with the addresses of this swarm, and no waiting."""
    config = read_yaml("prometheus/prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = read_yaml("prometheus/alerts.yml")
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["for"]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    targets = {"shoal-peers": peers, "shoal-monitor": [monitor]}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_endless_run(folder: Path) -> tuple[str, ...]:
    """Write a run of one stage that is measured after each update; return options to train it."""
    path = write_run(folder, num_updates=100_000, num_held_out=200)
    text = path.read_text().replace("stage_borders = [2]\n", "")
    path.write_text("held_out_every = 1\n" + text)
    return "--train", str(path)


def test_every_query_is_answered_over_a_swarm(tmp_path: Path) -> None:
    training = write_endless_run(tmp_path)
    with LocalSwarm(MODEL, spans=[(0, 8)]) as swarm, contextlib.ExitStack() as stack:
        options = (*OPTIONS, *training)
        added = [swarm.add((0, 8), options=[*options, *more]) for more in (["--new-run"], [])]
        peers = [urllib.parse.urlsplit(peer.facts["url"]).netloc for peer in added]
        monitor = stack.enter_context(monitoring(swarm, tmp_path))
        config = write_config(tmp_path, peers, monitor)
        prometheus = Prometheus(URL)
        stack.enter_context(
            running(
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address={urllib.parse.urlsplit(URL).netloc}",
                "--log.level=warn",
            )
        )
        prometheus.wait_for("shoal_monitor_canary_hop_seconds")
        prometheus.wait_for("rate(shoal_monitor_canary_runs_total[5m])")
        prometheus.wait_for('shoal_model_replicas_min{model="run/test"} == 2')
        prometheus.wait_for("shoal_run_held_out_loss")
        prometheus.wait_for('absent(ALERTS{alertname="ShoalModelDegraded",alertstate="firing"})')

        unanswered = prometheus.list_unanswered(has_run=True)

        quiet = ("ShoalModelDegraded", "ShoalModelFailing", "ShoalPeerDown")
        alarmed = [alert for alert in quiet if prometheus.is_firing(alert)]
        swarm.peers[0].kill()
        added[0].kill()
        prometheus.wait_for(FIRING.format("ShoalPeerDown"))
        prometheus.wait_for(FIRING.format("ShoalModelDegraded"))
        added[1].kill()
        prometheus.wait_for(FIRING.format("ShoalCanaryFailing"))
        prometheus.wait_for(FIRING.format("ShoalModelFailing"))

    assert not unanswered
    assert not alarmed
