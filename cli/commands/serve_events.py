"""What `shoal serve` prints of what happens, for people or for programs, and tells systemd."""

import argparse
import sys
from functools import partial

from ...peer.process.config import PeerEvent, Report
from ..operating.systemd_service import notify_systemd
from ..options.join_options import describe_last_swarm, quote_swarm
from ..terminal.interrupts import INTERRUPTED_FACTS
from ..terminal.peer_events import EventPrinter, print_json
from ..terminal.terminal import Terminal
from ..training.run_events import RunEventPrinter


def choose_report(options: argparse.Namespace) -> Report:
    """Return what tells the events of a peer, and of the run that it trains beside its model."""
    if options.json:
        report = print_json
    else:
        way_in = quote_swarm(options.initial_peers, options.join)
        report = EventPrinter(options.model, way_in)
        report = report if options.run_file is None else RunEventPrinter(report)
    report = notify_systemd(report)
    if options.new_swarm and not options.join and options.listen != "127.0.0.1":  # --local
        report = partial(report_with_last_swarm, report)
    return report


def report_with_last_swarm(report: Report, event: PeerEvent) -> None:
    """Report an event, and at the start where this machine was in a swarm within a day.

    After a crash it may be an error to begin another one: peers of other machines stay behind.
    """
    report(event)
    if event.name == "started" and (facts := describe_last_swarm()):
        report(PeerEvent("last_swarm", facts))


def print_interrupted(is_json: bool) -> None:
    """Print that a signal came before the peer was online."""
    words = INTERRUPTED_FACTS if is_json else "Stopped before this peer was online."
    Terminal(sys.stdout).print(words)
