"""`shoal drain`: have a peer of this machine hand over its sessions and serve nothing."""

import argparse
import sys

from ..options.quantities import parse_positive
from ..terminal.terminal import Terminal
from .local_peers import add_name_arguments, call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal drain`."""
    parser.description = (
        "Have a peer hand over its sessions to other peers, and serve nothing until `shoal "
        "resume`. It stays in the swarm, with its blocks in memory. The command ends once it is "
        "idle."
    )
    add_name_arguments(parser)
    parser.add_argument(
        "--wait", type=parse_positive, default=120.0, metavar="SECONDS",
        help="how long to wait until the peer is idle (default: %(default)s)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Drain a peer; return 0 once it is idle."""
    peer = call(options, "Drain", f"Draining {options.name}", timeout_seconds=options.wait)
    terminal = Terminal(sys.stdout)
    if options.json:
        terminal.print_json(peer)
    else:
        terminal.print(f"{peer['name']} serves nothing now; `shoal resume {peer['name']}` ends it.")
    return 0
