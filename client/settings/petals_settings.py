"""Settings by the names that PETALS gave them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "connect_timeout": "connect_timeout_seconds",
    "update_period": "refresh_seconds",
}

_LAST_FOREVER = "failover_timeout_seconds says how long a search for peers may take"
_IS_MEASURED = "how long a peer may take is measured"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "ban_timeout": "how long a peer is avoided follows from what it did",
    "daemon_startup_timeout": "nothing is started that it would limit",
    "dht_prefix": "the name of a model follows from its configuration and weights",
    "low_cpu_mem_usage": "weights are read without a copy anyway",
    "max_backoff": _LAST_FOREVER,
    "max_pinged": _IS_MEASURED,
    "max_retries": _LAST_FOREVER,
    "min_backoff": _LAST_FOREVER,
    "ping_timeout": _IS_MEASURED,
    "request_timeout": _IS_MEASURED,
    "show_route": "`session.hops` is the route",
}
"""What a script may go on saying, and why it changes nothing here."""


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
        warnings.warn(f"without effect: {', '.join(ignored)}", stacklevel=2)
    return found
