"""`shoal top`: the health of a swarm, live on the terminal."""

import argparse
import contextlib
import sys

from ...protocol.errors import UsageError
from ..options.join_options import add_join_arguments, read_joining
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal
from .watching_options import add_model_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal top`."""
    add_join_arguments(parser)
    add_model_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Show a swarm until the user quits; return 0."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("this needs a terminal; `shoal monitor --once` prints the state")
    joining = read_joining(options)
    with (
        Progress(Terminal(sys.stderr), lambda: "Starting"),
        quitting_at_once(),
        importing_much(),
    ):
        from ...client.monitor.access import make_access
        from ...client.monitor.history import History
        from ...client.monitor.monitor import Monitor
        from .live_screen import LiveScreen
    access = make_access(joining.membership)
    with contextlib.closing(History(None, 0.0, access.clock.wall())) as history:
        monitor = Monitor(access, history, only=options.models)
        LiveScreen(monitor, joining.addresses).run()
    return 0
