"""The settings of a client from arguments of from_pretrained(), under our names or PETALS'."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...protocol.errors import UsageError
from .client_config import ClientConfig

_RENAMED_FROM_PETALS = {
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
    "trust_remote_code": "code of a model's repository is never run",
}
"""Settings of PETALS that are accepted without effect, and why."""

_STAR = "use_server_to_server"

PETALS_SETTINGS = frozenset({*_RENAMED_FROM_PETALS, *_WITHOUT_EFFECT, _STAR})
"""All settings of PETALS that are not called the same here."""


def is_client_setting(name: str) -> bool:
    """Return whether an argument of from_pretrained() is a setting of clients."""
    return name in PETALS_SETTINGS or name in _list_names()


def check_known(names: Iterable[str]) -> None:
    """Raise UsageError unless all of these are settings of clients."""
    known = _list_names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UsageError(
            f"from_pretrained() does not know {', '.join(unknown)}; client settings are "
            f"{', '.join(known)}"
        )


def _list_names() -> list[str]:
    return sorted(field.name for field in fields(ClientConfig))


def make_client_config(initial_peers: object, options: dict[str, Any]) -> ClientConfig:
    """Return the settings passed to from_pretrained(); raises UsageError for unknown ones.

    Names of PETALS are translated. What is None is not given: a caller may pass on what nobody gave
    it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    options = _translate_settings(given)
    check_known(options)
    addresses = () if initial_peers is None else make_initial_peers(initial_peers)
    if options.get("allowed_servers") is not None:
        options["allowed_servers"] = _read_peer_ids("allowed_servers", options["allowed_servers"])
    options["blocked_servers"] = _read_peer_ids(
        "blocked_servers", options.get("blocked_servers") or ()
    )
    return ClientConfig(initial_peers=addresses, **options)


def _translate_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under our names; warns of those that have no effect here."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            ignored.append(f"{name} ({_WITHOUT_EFFECT[name]})")
        elif name == _STAR:
            found["delivery"] = "chain" if value else "star"
        else:
            found[_RENAMED_FROM_PETALS.get(name, name)] = value
    if ignored:
        warnings.warn(f"settings without effect: {', '.join(ignored)}", stacklevel=2)
    return found


def _read_peer_ids(name: str, given: object) -> tuple[str, ...]:
    """Return ids of peers, which may be texts or objects of hivemind."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{name} must be a list of peer ids (['12D3KooW…']), not {given!r:.80}")
    return tuple(map(str, given))


def make_initial_peers(given: object) -> tuple[str, ...]:
    """Return the addresses that were given: one, or several, as texts or objects of multiaddr.

    >>> make_initial_peers("/ip4/…") == make_initial_peers(["/ip4/…"])
    True
    """
    if _is_address(given):
        return (str(given),)
    if not isinstance(given, Sequence) or not all(map(_is_address, given)):
        raise UsageError(f"initial_peers must be addresses, ['/ip4/…'], not {given!r}")
    return tuple(map(str, given))


def _is_address(given: object) -> bool:
    return isinstance(given, str) or str(given).startswith("/")
