"""Questions to a running Prometheus, and what of docker/ it leaves without an answer."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from container_files import list_alerts, list_panel_queries, name_metrics

RARE = {"shoal_peer_refusals_total"}
"""Of queries that show nothing until something is refused."""

FIRING = 'ALERTS{{alertname="{}",alertstate="firing"}}'


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that is asked over HTTP, and raises OSError where it does not answer."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str, seconds: float = 180.0) -> None:
        """Wait until a query has an answer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.query(expression):
                    return
            time.sleep(0.5)
        raise AssertionError(f"no answer to {expression}")

    def is_firing(self, alert: str) -> bool:
        return bool(self.query(FIRING.format(alert)))

    def list_unanswered(self, *, has_run: bool = False) -> list[str]:
        """Return what of docker/ has no answer: queries of panels, metrics of alerts, bad rules.

        Nothing tells of a training run in a swarm that has none.
        """
        metrics = set[str]().union(*(name_metrics(alert["expr"]) for alert in list_alerts()))
        silent = [
            one
            for one in [*list_panel_queries(), *sorted(metrics)]
            if not name_metrics(one) <= RARE
            and (has_run or not any("_run_" in name for name in name_metrics(one)))
            and not self.query(one)
        ]
        rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
        healthy = {rule["name"] for rule in rules if rule["health"] == "ok"}
        return silent + [one["alert"] for one in list_alerts() if one["alert"] not in healthy]
