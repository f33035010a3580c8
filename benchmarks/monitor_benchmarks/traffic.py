"""Bytes per second by which a monitor knows a swarm, beside those of the announcements themselves.

The monitor joins as it ships: over p2pd, TCP and TLS. It and the swarm have a network namespace
each, and all bytes between the two are counted. Some of the swarm's peers are nodes of its DHT, and
each answers at a port of its own. Probes are left out: to the monitor everybody answers at once.

Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from measuring.crowd import PERIOD_SECONDS
from measuring.helper_process import HelperProcess
from measuring.program import measure_one, run_program
from measuring.report import TargetFigure, at_most
from measuring.slow_network import SlowNetwork
from shoal.cli.benchmarking.figure import Figure

_MBITS = 1000.0


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    """Return what the monitor sends and receives, and the ratio to what all peers announce."""
    with SlowNetwork(2, _MBITS) as network:
        (host, in_swarm), (_, in_monitor) = network.places
        sizes = str(options.peers), str(options.nodes)
        say("starting the swarm")
        with HelperProcess(f"{__package__}.swarm", host, *sizes, inside=in_swarm) as swarm:
            addresses, mean_bytes = swarm.read()
            say("joining it")
            watched = str(options.peers), *addresses
            with HelperProcess(f"{__package__}.watcher", *watched, inside=in_monitor) as watcher:
                time.sleep(options.warm_up)
                started_at, before = time.perf_counter(), _count(watcher)
                say("counting")
                time.sleep(options.seconds)
                seconds, after = time.perf_counter() - started_at, _count(watcher)
    received, sent, from_peers, to_peers = (
        (after[way] - before[way]) / seconds
        for way in ("received", "sent", "from peers", "to peers")
    )
    told = options.peers * mean_bytes / PERIOD_SECONDS
    return [
        Figure("peers on the page", after["peers"], ""),
        Figure("mean announcement", mean_bytes, "bytes"),
        Figure("announced by all peers", told / 1e3, "KB/s"),
        Figure("received by the monitor", received / 1e3, "KB/s"),
        Figure("+ from peers, of what is announced", from_peers / told, "x"),
        Figure("sent by it", sent / 1e3, "KB/s"),
        Figure("+ to peers, of what is announced", to_peers / told, "x"),
        TargetFigure("both, of what is announced", (received + sent) / told, "x", at_most(1.2)),
    ]


def _count(watcher: HelperProcess) -> dict[str, int]:
    watcher.tell("count")
    return watcher.read()


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=20, help="how many of them have a p2pd")
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds before counting")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="how long to count, one search of the DHT included",
    )
    return measure_one(
        "traffic", "Directory traffic of a monitor of {peers} peers", parser, measure
    )


if __name__ == "__main__":
    run_program(main)
