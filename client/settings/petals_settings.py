"""Settings by the names that PETALS gave them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "connect_timeout": "connect_timeout_seconds",
    "update_period": "refresh_seconds",
}

_LAST_FOREVER = "failover_timeout_seconds limits the search for peers"
_IS_MEASURED = "timeouts of peers follow from measured response times"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "ban_timeout": "the quarantine of a peer depends on its failures",
    "daemon_startup_timeout": "no daemon is started",
    "dht_prefix": "the model id is computed from configuration and weights",
    "low_cpu_mem_usage": "weights are always read without a copy",
    "max_backoff": _LAST_FOREVER,
    "max_pinged": _IS_MEASURED,
    "max_retries": _LAST_FOREVER,
    "min_backoff": _LAST_FOREVER,
    "ping_timeout": _IS_MEASURED,
    "request_timeout": _IS_MEASURED,
    "show_route": "read `session.hops` instead",
}
"""Settings of PETALS that are accepted without effect, and why."""


def translate_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under our names; warns of those that have no effect here."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            ignored.append(f"{name} ({_WITHOUT_EFFECT[name]})")
        elif name == "use_server_to_server":
            found["delivery"] = "chain" if value else "star"
        else:
            found[_RENAMED.get(name, name)] = value
    if ignored:
        warnings.warn(f"settings without effect: {', '.join(ignored)}", stacklevel=2)
    return found
