"""`shoal serve`: run a peer until Ctrl-C, SIGTERM or the end of its terminal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from ...peer.process.config import PeerConfig, PeerEvent, Report
from ...protocol.errors import DirectoryError, UsageError
from ...protocol.net.dht.internet import InternetNetwork
from ..operating.systemd_service import INSTALL, install_service, notify_systemd
from ..options.bundled_model import find_commit
from ..options.join_options import describe_last_swarm, list_addresses_of_new, quote_swarm
from ..options.serve_options import add_serve_arguments, make_configs, make_network
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import (
    INTERRUPTED,
    INTERRUPTED_FACTS,
    quitting_at_once,
    stop_on_sigterm,
)
from ..terminal.peer_events import EventPrinter, print_json
from ..terminal.peer_status import showing_status
from ..terminal.signalled import run_until_signalled
from ..terminal.terminal import Terminal

if TYPE_CHECKING:
    from ...peer.operating.operation import Operation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal serve`."""
    add_serve_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.add_argument(
        INSTALL, action="store_true",
        help="run nothing, but write a user's unit of systemd with these options, and say how to "
        "enable it",
    )  # fmt: skip
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Serve until asked to stop; return 0, or 130 if the peer was never online."""
    if options.install_service:
        make_network(options)  # wrong options are told now
        make_configs(options)
        return install_service(options, options.words)
    with stop_on_sigterm():
        if _run(options):
            return 0
    words = INTERRUPTED_FACTS if options.json else "Stopped before this peer was online."
    Terminal(sys.stdout).print(words)
    return INTERRUPTED


def _run(options: argparse.Namespace) -> bool:
    way_in = quote_swarm(options.initial_peers, options.join)
    report = print_json if options.json else EventPrinter(options.model, way_in)
    report = notify_systemd(report)
    network = make_network(options)
    config, operator = make_configs(options)
    _show_losses_of_the_directory()
    with quitting_at_once(options.json), importing_much():
        find_commit(config.model)  # or say at once that there is none
        # Seconds of torch, before the loop is there.
        from ...peer import peer  # noqa: F401
        from ...peer.operating.operation import OperatingConfig, Operation
    operating = OperatingConfig(options.metrics, operator)
    with (
        Operation.prepare(operating) as operation,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if addresses := list_addresses_of_new(options):
            runner.run(_check_is_new(replace(network, initial_peers=addresses)))
        if options.new_swarm and not options.join and options.listen != "127.0.0.1":  # --local
            report = partial(_report_with_last_swarm, report)
        run_peer = partial(_run_peer, config, network, operation, options.json)
        return runner.run(run_until_signalled(run_peer, report, options.end_with_stdin))


def _show_losses_of_the_directory() -> None:
    """Print when it is lost and when it is back; in programs of users that is only logged."""
    logger = logging.getLogger("shoal.protocol.net.dht.hivemind_directory")
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)


def _report_with_last_swarm(report: Report, event: PeerEvent) -> None:
    """Report an event, and at the start where this machine was in a swarm within a day.

    After a crash it may be an error to begin another one: peers of other machines stay behind.
    """
    report(event)
    if event.name == "started" and (facts := describe_last_swarm()):
        report(PeerEvent("last_swarm", facts))


async def _check_is_new(network: InternetNetwork) -> None:
    """Raise UsageError where somebody answers in a swarm that is to begin."""
    try:
        transport, directory = await network.connect()
    except DirectoryError:
        return
    await transport.close()
    await directory.close()
    raise UsageError("the swarm of this code runs already: leave out --new-swarm to join it")


async def _run_peer(
    config: PeerConfig,
    network: InternetNetwork,
    operation: Operation,
    is_json: bool,
    stop: asyncio.Event,
    report: Report,
) -> None:
    """Serve a span over the internet until `stop` is set."""
    from ...peer.peer import Peer

    clock = network.clock
    report = operation.pass_on(report, clock)

    def note_stranger(host: str, is_local: bool) -> None:
        report(PeerEvent("got_through", {"host": host, "is_local": is_local}))

    network = replace(network, note_stranger=note_stranger)
    async with (
        Peer.join(config, network, clock, report) as peer,
        operation.run(peer, clock, report) as read_figures,
        showing_status(read_figures, is_json),
    ):
        await peer.serve(stop)
    report(PeerEvent("left"))
