"""What the files in docker/ hold, read for tests."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"

Document = dict[str, Any]
"""What a YAML file holds."""


def read_yaml(name: str) -> Document:
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


def list_kubernetes() -> list[Document]:
    return [
        one
        for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def list_alerts() -> list[Document]:
    groups = read_yaml("prometheus/alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def list_panel_queries() -> list[str]:
    """Return the expressions of all panels of the dashboard."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/shoal.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def name_metrics(query: str) -> set[str]:
    """Return the metrics that a query reads.

    >>> sorted(name_metrics('sum by (le) (rate(shoal_peer_step_seconds_bucket{a="up"}[5m])) > up'))
    ['shoal_peer_step_seconds_bucket', 'up']
    """
    without_labels = re.sub(r"\{[^}]*\}|\b(by|without) \([^)]*\)|\[\w+\]", "", query)
    return set(re.findall(r"\b(?:shoal|process)_\w+|\bup\b", without_labels))
