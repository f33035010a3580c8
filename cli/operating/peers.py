"""`shoal peers`: the peers of this user that run on this machine, or the id of one that may run."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ...peer.process.identity_file import load_or_create_identity
from ..options.quantities import show_bytes
from ..options.shared_options import add_identity_argument
from ..terminal.terminal import Terminal
from .local_peers import describe_all, describe_state

_ID_CHARACTERS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal peers`."""
    add_identity_argument(
        parser,
        "print only the id of a peer with this identity file, running or not; the file is created "
        "if missing",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """List the peers, or print the id that a file stands for; return 1 where one is silent."""
    terminal = Terminal(sys.stdout)
    if options.identity is not None:
        return _tell_id(options.identity, terminal, options.json)
    peers = describe_all(options.json)
    if options.json:
        terminal.print_json({"peers": peers})
    elif not peers:
        terminal.print("No peer of yours runs on this machine.")
    else:
        headings = ("name", "id", "model", "blocks", "sessions", "memory", "state")
        terminal.print_table([headings, *map(_make_row, peers)])
    return int(any("error" in peer for peer in peers))


def _tell_id(path: Path, terminal: Terminal, is_json: bool) -> int:
    peer_id = load_or_create_identity(path).peer_id
    if is_json:
        terminal.print_json({"peer_id": peer_id})
    else:
        terminal.print(peer_id)
    return 0


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
