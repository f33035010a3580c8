"""The options that say which models are watched, by which canaries, and who hears of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...peer.process.identity_file import check_private
from ...protocol.errors import UsageError
from ..options.bundled_model import find_model
from ..options.join_options import Joining
from ..options.quantities import parse_model_id

if TYPE_CHECKING:
    from ...client.monitor.canary import CanaryProcess
    from ...protocol.net.clock import Clock

_MAX_URL_CHARACTERS = 4096


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --model."""
    parser.add_argument(
        "--model", dest="models", type=parse_model_id, action="append", default=[], metavar="ID",
        help="watch this model only, by the id that --once --json shows; may be given several "
        "times (default: every model that peers announce, at most 32)",
    )  # fmt: skip


def add_canary_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --canary."""
    parser.add_argument(
        "--canary", dest="canaries", action="append", default=[], metavar="MODEL",
        help="every minute, generate a few tokens with this model over the swarm and measure them; "
        "needs the model's files on this machine, without its blocks, and is load for the swarm. "
        "May be given several times",
    )  # fmt: skip


def make_canaries(models: Sequence[str], joining: Joining, clock: Clock) -> list[CanaryProcess]:
    """Return the canaries of some models; raises ModelError for one that is not there."""
    from ...client.monitor.canary import CanaryProcess

    command = [sys.executable, "-P", "-m", "shoal.cli.monitoring.canary_process"]
    swarm = {"join": joining.join, "initial_peers": list(joining.initial_peers)}
    return [
        CanaryProcess(name, command, {"model": find_model(name), **swarm}, clock)
        for name in dict.fromkeys(models)
    ]


def read_webhook(given: str) -> str:
    """Return the address for alerts; the process list shows what is not in a file."""
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            url, mode = file.read(_MAX_URL_CHARACTERS).strip(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"cannot read the webhook's address {path}: {error.strerror}") from error
    check_private(path, mode, "webhook's address in")
    return url
