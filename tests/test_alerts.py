"""Each alert in docker/ fires once its condition has lasted. Needs `promtool`, of `prometheus`."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from container_files import DOCKER, list_alerts


class Case(NamedTuple):
    """A metric that turns bad, and the sentence of the alert that is due some minutes later."""

    alert: str
    minutes: int
    metric: str
    labels: dict[str, str]
    good: float | str
    """A number, or the first one and what is added each minute, as promtool writes it."""
    bad: float
    summary: str
    others: Mapping[str, float] = {}
    """Metrics with the same labels that stay as they are."""


MODEL = {"model": "stories"}
MONITOR = {"job": "shoal-monitor", "instance": "watch:8480"}
PEER = {"job": "shoal-peers", "instance": "lab:9480"}
ONLINE = {**PEER, "state": "online"}

CASES = [
    Case(
        *("ShoalModelFailing", 1, "shoal_model_blocks_missing", MODEL, 0, 2),
        "2 blocks of stories have no peer",
    ),
    Case(
        *("ShoalModelDegraded", 10, "shoal_model_blocks_single", MODEL, 0, 3),
        "3 blocks of stories have a single replica",
    ),
    Case(
        *("ShoalDirectorySilent", 5, "shoal_swarm_directory_age_seconds", MONITOR, 30, 121),
        "watch:8480 does not know the state of the swarm",
    ),
    Case(
        *("ShoalDirectorySilent", 5, "shoal_swarm_health", MONITOR, 0, 3),
        "watch:8480 does not know the state of the swarm",
    ),
    Case(
        *("ShoalRunStalled", 29, "shoal_run_update", MODEL, "1+1", 10),
        "stories is at update 10 for half an hour",
        {"shoal_run_updates": 400},
    ),
    Case(
        *("ShoalCanaryFailing", 3, "shoal_monitor_canary_up", MODEL, 1, 0),
        "the canary cannot generate with stories",
    ),
    Case(
        *("ShoalCanaryTextDiffers", 3, "shoal_monitor_canary_same_text", MODEL, 1, 0),
        "the canary's text with stories is not that of its first run",
    ),
    Case(*("ShoalMonitorDown", 2, "up", MONITOR, 1, 0), "the monitor watch:8480 does not answer"),
    Case(*("ShoalPeerDown", 2, "up", PEER, 1, 0), "the peer lab:9480 does not answer"),
    Case(
        *("ShoalPeerNotServing", 15, "shoal_peer_state", ONLINE, 1, 0),
        "the peer lab:9480 runs and is not online",
    ),
    Case(
        *("ShoalSessionsWaiting", 5, "shoal_peer_sessions_waiting", PEER, 0, 2),
        "2 sessions wait for KV memory at lab:9480",
    ),
    Case(
        *("ShoalPeerOverloaded", 5, "shoal_peer_loop_lag_seconds", PEER, 0.01, 0.2),
        "the event loop of lab:9480 is 0.2 s late",
    ),
]

GOOD_MINUTES = 10


def plan_test(case: Case, alert: dict[str, Any]) -> dict[str, Any]:
    """Return promtool's test: good for ten minutes, then bad, with no alert before it is due."""
    due = GOOD_MINUTES + case.minutes
    labels = ",".join(f'{name}="{value}"' for name, value in case.labels.items())
    fired = {
        "exp_labels": {**case.labels, **alert["labels"]},
        "exp_annotations": {**alert["annotations"], "summary": case.summary},
    }
    return {
        "interval": "1m",
        "input_series": [
            {
                "series": f"{case.metric}{{{labels}}}",
                "values": f"{case.good}x{GOOD_MINUTES - 1} {case.bad}x60",
            },
            *(
                {"series": f"{name}{{{labels}}}", "values": f"{value}x{GOOD_MINUTES + 60}"}
                for name, value in case.others.items()
            ),
        ],
        "alert_rule_test": [
            {"eval_time": f"{GOOD_MINUTES - 1}m", "alertname": case.alert, "exp_alerts": []},
            {"eval_time": f"{due - 1}m", "alertname": case.alert, "exp_alerts": []},
            {"eval_time": f"{due}m", "alertname": case.alert, "exp_alerts": [fired]},
        ],
    }


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {alert["alert"] for alert in list_alerts()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_alerts_fire_once_their_condition_has_lasted(tmp_path: Path) -> None:
    alerts = {alert["alert"]: alert for alert in list_alerts()}
    plan = {
        "rule_files": [str(DOCKER / "prometheus" / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [plan_test(case, alerts[case.alert]) for case in CASES],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(plan))

    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_accepts_its_configuration() -> None:
    config = DOCKER / "prometheus" / "prometheus.yml"

    done = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stdout + done.stderr
