"""`shoal monitor`: the health of a swarm, as a web page or once on the terminal."""

import argparse
import asyncio
import contextlib
import hashlib
import sys
from pathlib import Path

from ...protocol.endpoints import is_loopback
from ...protocol.errors import UsageError
from ..options.join_options import Joining, add_join_arguments, read_joining
from ..options.quantities import parse_count, parse_listen
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Terminal
from .once import run_once
from .watching_options import (
    add_canary_argument,
    add_model_argument,
    make_canaries,
    read_webhook,
)

_DEFAULT_LISTEN = "127.0.0.1:8480"
_HISTORY_FOLDER = "~/.local/state/shoal"
_DAY_SECONDS = 24 * 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal monitor`."""
    add_join_arguments(parser)
    add_model_argument(parser)
    parser.add_argument(
        "--once", action="store_true",
        help="print the state of the swarm and end, counting the peers that answer: exit code 0 "
        "if every block has two replicas, 1 if one has a single replica, 2 if one has none, 3 if "
        "no directory answers, 64 for a wrong option",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON object")
    parser.add_argument(
        "--listen", default=_DEFAULT_LISTEN, metavar="HOST:PORT",
        help="address of the page; it asks for no password, so keep it on loopback or behind a "
        "proxy that does "
        "(default: %(default)s)",
    )  # fmt: skip
    add_canary_argument(parser)
    parser.add_argument(
        "--webhook", metavar="URL",
        help="post alerts to this address, or to the one in @FILE, as JSON: a model degraded, "
        "failing or healthy again, a peer lost that was alone at its blocks, a canary that fails, "
        "recovers or says other text",
    )  # fmt: skip
    parser.add_argument(
        "--history", metavar="FILE",
        help="SQLite file that keeps events and replica depths, of one swarm (default: one in "
        f"{_HISTORY_FOLDER})",
    )  # fmt: skip
    parser.add_argument(
        "--keep-days", type=parse_count, default=14, metavar="DAYS",
        help="how long the history is kept (default: %(default)s)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show the health of a swarm; with --once return it as the exit code."""
    if options.json and not options.once:
        raise UsageError("--json needs --once")
    if options.webhook and options.once:
        raise UsageError("--webhook does not go with --once, which has an exit code")
    joining = read_joining(options)
    return run_once(options, joining) if options.once else _serve(options, joining)


def _serve(options: argparse.Namespace, joining: Joining) -> int:
    """Serve the page until Ctrl-C, SIGTERM or the end of the terminal; return 0."""
    host, port = parse_listen(options.listen)
    with quitting_at_once(), importing_much():
        from ...client.monitor.access import make_access
        from ...client.monitor.history import History
        from ...client.monitor.monitor import Monitor
        from ...peer.operating.http_server import listen, name_url
        from .page_server import serve_until_signalled
    access = make_access(joining.membership)
    canaries = make_canaries(options.canaries, joining, access.clock)
    webhook = None
    if options.webhook:
        from ...client.monitor.webhook import Webhook

        webhook = Webhook(read_webhook(options.webhook), access.clock)
    path = Path(options.history or _name_history(joining)).expanduser()
    keep_seconds = options.keep_days * _DAY_SECONDS
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(host, port, "--listen"))
        history = stack.enter_context(
            contextlib.closing(History(path, keep_seconds, access.clock.wall()))
        )
        terminal = Terminal(sys.stdout)
        terminal.print(f" The swarm: {name_url(listening)} (Ctrl-C ends the monitor)")
        if not is_loopback(host):
            warning = "Everybody who reaches this address sees the page: it asks for no password."
            for line in terminal.wrap(f" {warning}"):
                terminal.print(terminal.paint(line, "yellow"))
        monitor = Monitor(access, history, only=options.models, canaries=canaries, webhook=webhook)
        asyncio.run(serve_until_signalled(monitor, listening, host, joining.addresses))
    return 0


def _name_history(joining: Joining) -> str:
    """Return the file for the history of a swarm: by its id, or by the addresses given for it."""
    membership = joining.membership
    swarm = membership.swarm_id if membership else ",".join(sorted(joining.addresses)).encode()
    return f"{_HISTORY_FOLDER}/monitor-{hashlib.sha256(swarm).hexdigest()[:12]}.sqlite"
