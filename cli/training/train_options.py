"""The options of `shoal train` for a run with others."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..options.join_options import add_join_arguments
from ..options.listen_options import add_listen_arguments
from ..options.quantities import parse_non_negative, parse_positive, parse_threads
from ..options.shared_options import (
    add_announce_period_argument,
    add_identity_argument,
    add_metrics_argument,
)


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a peer that trains with others."""
    swarm = parser.add_mutually_exclusive_group()
    swarm.add_argument(
        "--new-swarm", action="store_true",
        help="begin the run in a new swarm, which others join, and print its join code",
    )  # fmt: skip
    add_join_arguments(parser, "join the swarm of the peer at this address", swarm)
    add_member_arguments(parser)
    add_listen_arguments(parser)
    add_identity_argument(parser)
    add_announce_period_argument(parser)
    add_metrics_argument(parser)
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def add_member_arguments(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    threads_option: str = "--threads",
) -> None:
    """Declare the options of whoever trains a run, maybe beside what it serves."""
    parser.add_argument(
        "--corpus", type=Path, metavar="FOLDER",
        help="folder of the corpus shards (default: that of the run file)",
    )  # fmt: skip
    parser.add_argument(
        threads_option, dest="run_threads", type=parse_threads, default=1, metavar="N",
        help="compute threads of the run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--new-run", action="store_true",
        help="begin the run in the swarm that --join or --initial-peers names",
    )  # fmt: skip
    parser.add_argument(
        "--admit", action="append", default=[], metavar="PEER_ID",
        help="let this peer take part in the run that begins here, beside its owner; `shoal peers "
        "--identity FILE` prints the id; may be repeated (default: whoever the swarm admits)",
    )  # fmt: skip
    parser.add_argument(
        "--stage", type=int, metavar="N",
        help="stage to hold, from 0 on (default: the one with the fewest peers)",
    )  # fmt: skip
    parser.add_argument(
        "--silence", type=parse_positive, default=10.0, metavar="SECONDS",
        help="how long another peer may be silent before the run goes on without it (default: "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--linger", type=parse_non_negative, default=10.0, metavar="SECONDS",
        help="how long to stay after the last update, as others may need the state (default: "
        "%(default)s)",
    )  # fmt: skip


def is_peer(options: argparse.Namespace) -> bool:
    """Return whether the options ask for a run with others."""
    return bool(options.new_swarm or options.new_run or options.join or options.initial_peers)
