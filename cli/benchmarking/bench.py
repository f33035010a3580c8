"""`shoal bench`: measure a running swarm from this machine."""

import argparse
import sys
import time

from ...protocol.errors import UsageError
from ..options.bundled_model import find_model
from ..options.join_options import add_join_arguments, read_joining
from ..remote_models.opening import open_model
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.terminal import Progress, Terminal
from .figure import describe_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal bench`."""
    parser.epilog = "To benchmark swarms on one machine, run `make bench` in a checkout of shoal."
    parser.add_argument(
        "--model", metavar="MODEL",
        help="model that the swarm serves: directory or Hub id",
    )  # fmt: skip
    add_join_arguments(parser, "address of any of its peers, instead of a code")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Measure and report; raises RouteError when blocks are missing."""
    if options.model is None:
        raise UsageError("say what the swarm serves: --model MODEL")
    model, joining = find_model(options.model), read_joining(options)
    status, started_at = "joining", time.monotonic()

    def say(text: str) -> None:
        nonlocal status
        status = text

    # It imports torch for seconds; usage errors above must not wait for it.
    from .swarm_speed import measure_swarm

    with (
        stop_on_sigterm(),
        Progress(Terminal(sys.stderr), lambda: status),
        open_model(model, joining.initial_peers, join=joining.join) as remote,
    ):
        figures = measure_swarm(remote, say)
    machine, seconds = describe_machine(), round(time.monotonic() - started_at, 1)
    output = Terminal(sys.stdout)
    if options.json:
        output.print_json({
            "machine": machine, "seconds": seconds,
            "figures": [figure.to_json() for figure in figures],
        })  # fmt: skip
        return 0
    output.print(f"{machine}\n\nThis swarm, as this machine sees it ({seconds} s)")
    for figure in figures:
        output.print(figure.to_line())
    return 0
