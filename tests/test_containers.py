"""The files in docker/: what they name exists."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from announcements import NOW, make_announcement
from operated_figures import make_figures
from prometheus_client.parser import text_string_to_metric_families
from watched_swarms import read

from shoal.client.monitor.canary import CanaryState
from shoal.client.monitor.description import describe, describe_canaries
from shoal.client.monitor.page.metrics import write_metrics as write_swarm_metrics
from shoal.peer.operating.figures import Replicas
from shoal.peer.operating.metrics import MEASURED
from shoal.peer.operating.metrics import write_metrics as write_peer_metrics

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
RUNBOOK = ROOT / "docs" / "operate.md"

Document = dict[str, Any]
"""What a YAML file holds."""

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""


def read_yaml(name: str) -> Document:
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def list_alerts() -> list[Document]:
    groups = read_yaml("prometheus/alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def list_queries() -> list[str]:
    """Return the expressions of all alerts and of all panels."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/shoal.json").read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [alert["expr"] for alert in list_alerts()] + [target["expr"] for target in targets]


def name_metrics(query: str) -> set[str]:
    """Return the metrics that a query reads.

    >>> sorted(name_metrics('sum by (le) (rate(shoal_peer_step_seconds_bucket{a="up"}[5m])) > up'))
    ['shoal_peer_step_seconds_bucket', 'up']
    """
    without_labels = re.sub(r"\{[^}]*\}|\b(by|without) \([^)]*\)|\[\w+\]", "", query)
    return set(re.findall(r"\b(?:shoal|process)_\w+|\bup\b", without_labels))


def list_served_metrics() -> set[str]:
    """Return what a peer and a monitor with a canary serve."""
    figures = replace(make_figures(), replicas=Replicas(1, 2), measured=dict.fromkeys(MEASURED, 1))
    described = replace(
        describe(read(make_announcement(1)), NOW),
        canaries=describe_canaries([CanaryState("a")], NOW),
    )
    texts = b"".join(write_peer_metrics(figures)).decode(), write_swarm_metrics(described, {})
    peer, swarm = texts[0], texts[1].decode()
    samples = {
        sample.name
        for text in (peer, swarm)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    # Families of which an example has no sample yet have a line of their own.
    return samples | set(re.findall(r"^# TYPE (\w+)", swarm, flags=re.M))


def test_alerts_and_dashboard_read_metrics_that_are_served() -> None:
    queries = list_queries()

    named = set[str]().union(*map(name_metrics, queries))

    assert all(map(name_metrics, queries))
    assert named - OF_PROMETHEUS <= list_served_metrics()


def test_ten_alerts_have_a_runbook() -> None:
    alerts = list_alerts()
    text = RUNBOOK.read_text(encoding="utf-8")

    assert len(alerts) == 10
    for alert in alerts:
        assert alert["annotations"]["runbook"] == "docs/operate.md#ten-alerts-and-what-to-do"
        assert f"`{alert['alert']}`" in text
    assert "## Ten alerts and what to do" in text
