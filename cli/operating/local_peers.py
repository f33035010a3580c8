"""Finds the peers of this user on this machine, and calls them."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from ...peer.operating.operator_addresses import list_sockets
from ...protocol.errors import UsageError
from ..options.quantities import show_bytes
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal

_ANSWER_SECONDS = 10.0
"""For a call that a peer answers at once; its loop may be busy."""


def add_name_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the name of a peer, and --json."""
    parser.add_argument("name", metavar="NAME", help="name of the peer, as `shoal peers` shows it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def call(
    options: argparse.Namespace,
    method: str,
    doing: str,
    fields: Mapping[str, Any] | None = None,
    timeout_seconds: float = _ANSWER_SECONDS,
) -> dict[str, Any]:
    """Call a method of the peer that the command line names; return the fields of its answer.

    Raises UsageError where no such peer runs, and for what it does not accept; UnavailableError
    where it does not answer.
    """
    sockets = dict(list_sockets())
    if options.name not in sockets:
        known = f"these do: {', '.join(sockets)}" if sockets else "no other does either"
        raise UsageError(f"no peer of yours named {options.name} runs on this machine; {known}")
    with Progress(Terminal(sys.stderr), lambda: doing):
        with quitting_at_once(options.json):
            from ...peer.operating.operator_client import call_peer
        return call_peer(sockets[options.name], options.name, method, timeout_seconds, fields or {})


def describe_all(is_json: bool) -> list[dict[str, Any]]:
    """Return the descriptions of all peers; of one that does not answer, name and `error`."""
    sockets = list(list_sockets())
    if not sockets:
        return []
    with quitting_at_once(is_json):
        from ...peer.operating.operator_client import call_peer
        from ...protocol.errors import ShoalError
    described: list[dict[str, Any]] = []
    for name, socket in sockets:
        try:
            described.append(call_peer(socket, name, "Describe", _ANSWER_SECONDS))
        except ShoalError as error:
            described.append({"name": name, "error": str(error)})
    return described


def describe_state(peer: Mapping[str, Any]) -> str:
    """Return the state of a peer for people, with the reasons of a pause.

    >>> describe_state({"state": "offline", "paused_because": ["drained by its owner"]})
    'paused: drained by its owner'
    """
    reasons = "; ".join(peer["paused_because"])
    if not reasons:
        return str(peer["state"])
    return f"paused: {reasons}" if peer["state"] == "offline" else f"pausing: {reasons}"


def show_limits(peer: Mapping[str, Any], terminal: Terminal) -> None:
    """Print the limits of a peer, and what of them is in use."""
    rows = [("limit", "in use", "at most")]
    limits, used = peer["limits"], peer["used"]
    rows.append(("sessions", str(used["sessions"]), str(limits["sessions"])))
    for name in ("kv_memory", "training_memory", "adapter_memory"):
        rows.append((name.replace("_", " "), show_bytes(used[name]), show_bytes(limits[name])))
    for name in ("upload", "download"):
        most = _show_rate(limits[name]) if limits[name] else "no limit"
        rows.append((name, _show_rate(used[name]), most))
    rows.append(("hours", "", limits["hours"].replace(",", ", ") or "all day"))
    terminal.print_table(rows)


def _show_rate(bytes_per_second: int) -> str:
    return f"{bytes_per_second / 1024:,.1f} KiB/s"
