"""`shoal peers`: the peers of this user that run on this machine."""

import argparse
import sys
from typing import Any

from ..terminal.terminal import Terminal
from .local_peers import describe_all, describe_state, show_bytes

_ID_CHARACTERS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal peers`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """List the peers; return 0, or 1 where one does not answer."""
    peers = describe_all(options.json)
    terminal = Terminal(sys.stdout)
    if options.json:
        terminal.print_json({"peers": peers})
    elif not peers:
        terminal.print("No peer of yours runs on this machine.")
    else:
        headings = ("name", "id", "model", "blocks", "sessions", "memory", "state")
        terminal.print_table([headings, *map(_make_row, peers)])
    return int(any("error" in peer for peer in peers))


def _make_row(peer: dict[str, Any]) -> tuple[str, ...]:
    if "error" in peer:
        return (peer["name"], "", "", "", "", "", "does not answer")
    return (
        peer["name"],
        f"…{peer['peer_id'][-_ID_CHARACTERS:]}",
        peer["model"] or "?",
        peer["span"],
        str(peer["sessions"]),
        show_bytes(peer["resident_bytes"]),
        describe_state(peer),
    )
