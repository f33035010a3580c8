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


def list_panel_targets() -> list[Document]:
    """Return the queries of all panels of the dashboard: `expr`, and its `legendFormat`."""
    dashboard = json.loads((DOCKER / "grafana/dashboards/shoal.json").read_text(encoding="utf-8"))
    return [target for panel in dashboard["panels"] for target in panel.get("targets", [])]


def list_panel_queries() -> list[str]:
    """Return the expressions of all panels of the dashboard."""
    return [target["expr"] for target in list_panel_targets()]


def name_metrics(query: str) -> set[str]:
    """Return the metrics that a query reads.

    >>> sorted(name_metrics('sum by (le) (rate(shoal_peer_step_seconds_bucket{a="up"}[5m])) > up'))
    ['shoal_peer_step_seconds_bucket', 'up']
    """
    without_labels = re.sub(r"\{[^}]*\}|\b(by|without) \([^)]*\)|\[\w+\]", "", query)
    return set(re.findall(r"\b(?:shoal|process)_\w+|\bup\b", without_labels))


def name_labels(query: str) -> tuple[set[str], set[str]]:
    """Return the labels that a query selects by, and those that it groups by.

    >>> selecting, grouping = name_labels('sum by (kind, le) (rate(a{state="up",job=~"x"}[5m]))')
    >>> sorted(selecting), sorted(grouping)
    (['job', 'state'], ['kind', 'le'])
    """
    selectors = re.findall(r"\{([^}]*)\}", query)
    selecting = {label for one in selectors for label in re.findall(r"(\w+)\s*[=!]", one)}
    grouping = re.findall(r"\b(?:by|on|ignoring|without) ?\(([^)]*)\)", query)
    return selecting, {label.strip() for one in grouping for label in one.split(",")}
