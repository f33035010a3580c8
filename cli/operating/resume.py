"""`shoal resume`: have a drained peer of this machine serve again."""

import argparse
import sys

from ..terminal.terminal import Terminal
from .local_peers import add_name_arguments, call, describe_state

_WAIT_SECONDS = 60.0
"""The directory has to hear of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal resume`."""
    add_name_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Resume a peer; return 0."""
    peer = call(options, "Resume", f"Resuming {options.name}", timeout_seconds=_WAIT_SECONDS)
    terminal = Terminal(sys.stdout)
    if options.json:
        terminal.print_json(peer)
    elif peer["paused_because"]:
        terminal.print(f"{peer['name']} is still {describe_state(peer)}.")
    else:
        terminal.print(f"{peer['name']} serves blocks {peer['span']} of {peer['num_blocks']}.")
    return 0
