"""`shoal serve`: run a peer until Ctrl-C, SIGTERM or the end of its terminal."""

from __future__ import annotations

import argparse
import asyncio
import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from ...peer.process.config import PeerConfig, PeerEvent, Report
from ...peer.process.identity_file import hold_identity
from ...protocol.net.dht.internet import InternetNetwork
from ..operating.systemd_service import INSTALL, install_service
from ..options.bundled_model import find_commit
from ..options.serve_options import add_serve_arguments, check_is_new, make_configs, make_network
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import INTERRUPTED, quitting_at_once, stop_on_sigterm
from ..terminal.peer_status import showing_status
from ..terminal.signalled import run_until_signalled
from ..training.serve_training import SideRun, add_training_arguments, check_training_options
from .serve_events import choose_report, print_interrupted

if TYPE_CHECKING:
    from ...peer.operating.operation import Operation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal serve`."""
    add_serve_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.add_argument(
        INSTALL, action="store_true",
        help="run nothing, but write a user's unit of systemd with these options, and say how to "
        "enable it",
    )  # fmt: skip
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Serve until asked to stop; return 0, or 130 if the peer was never online."""
    check_training_options(options)
    if options.install_service:
        make_network(options)  # wrong options are told now
        make_configs(options)
        return install_service(options, options.words)
    with stop_on_sigterm():
        if _run(options):
            return 0
    print_interrupted(options.json)
    return INTERRUPTED


def _run(options: argparse.Namespace) -> bool:
    report = choose_report(options)
    network = make_network(options)
    config, operator = make_configs(options)
    side_run = None if options.run_file is None else SideRun(options)
    _show_losses_of_the_directory()
    with quitting_at_once(options.json), importing_much():
        find_commit(config.model)  # or say at once that there is none
        # Seconds of torch, before the loop is there.
        from ...peer import peer  # noqa: F401
        from ...peer.operating.operation import OperatingConfig, Operation

        if side_run is not None:
            from ...peer.runs.run_peer import training_beside  # noqa: F401
    with ExitStack() as stack:
        operating = OperatingConfig(options.metrics, operator)
        operation = stack.enter_context(Operation.prepare(operating))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(check_is_new(options, network))
        run_peer = partial(_run_peer, config, network, operation, options, side_run)
        return runner.run(run_until_signalled(run_peer, report, options.end_with_stdin))


def _show_losses_of_the_directory() -> None:
    """Print when it is lost and when it is back; in programs of users that is only logged."""
    logger = logging.getLogger("shoal.protocol.net.dht.hivemind_directory")
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)


async def _run_peer(
    config: PeerConfig,
    network: InternetNetwork,
    operation: Operation,
    options: argparse.Namespace,
    side_run: SideRun | None,
    stop: asyncio.Event,
    report: Report,
) -> None:
    """Serve a span over the internet until `stop` is set, and train beside it if a run is given."""
    from ...peer.peer import Peer

    clock = network.clock
    report = operation.pass_on(report, clock)

    def note_stranger(host: str, is_local: bool) -> None:
        report(PeerEvent("got_through", {"host": host, "is_local": is_local}))

    network = replace(network, note_stranger=note_stranger)
    async with AsyncExitStack() as stack:
        identity = stack.enter_context(hold_identity(config.identity_path))
        if side_run is not None:
            run_bytes = await side_run.prepare(network, identity, clock)
            config = replace(config, run_bytes=run_bytes)
        joining = Peer.join(config, network, clock, report, identity=identity)
        peer = await stack.enter_async_context(joining)
        read_figures = await stack.enter_async_context(operation.run(peer, clock, report))
        showing = showing_status(read_figures, options.json, operation.run_figures)
        await stack.enter_async_context(showing)
        if side_run is not None:
            from ...peer.runs.run_peer import training_beside

            training = training_beside(
                peer.joined,
                partial(side_run.find_config, peer.joined.presence, clock),
                clock,
                stop,
                report,
                may_leave=not options.end_with_stdin,
            )
            await stack.enter_async_context(training)
        await peer.serve(stop)
    report(PeerEvent("left"))
