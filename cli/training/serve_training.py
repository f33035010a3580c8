"""The run in which a peer of `shoal serve` takes part, beside the model that it serves."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from ...peer.process.config import PeerEvent, Report
from ...peer.process.identity_file import hold_identity
from ...protocol.errors import UsageError
from ...protocol.identity import Identity
from ...protocol.net.dht.internet import InternetNetwork
from ...protocol.runs.run_record import RunRecord
from ..options.quantities import parse_count
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.signalled import run_until_signalled
from .run_choice import choose_record, load_own_run, make_config
from .train_options import add_member_arguments

if TYPE_CHECKING:
    from ...peer.runs.run_resources import RunPeerConfig


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run beside the model that is served."""
    group = parser.add_argument_group("training", "a training run to take part in as well")
    group.add_argument(
        "--train", type=Path, metavar="RUN",
        help="name or id of a run of the swarm, or a run file; the run begins here with --new-run "
        "or --new-swarm",
    )  # fmt: skip
    group.add_argument(
        "--corpus", type=Path, metavar="FOLDER",
        help="folder of the corpus shards (default: that of the run file)",
    )  # fmt: skip
    group.add_argument(
        "--train-threads", type=parse_count, default=1, metavar="N",
        help="compute threads of the run (default: %(default)s)",
    )  # fmt: skip
    add_member_arguments(group)


def check_training_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options of a run that do not fit."""
    given = {
        "--corpus": options.corpus is not None,
        "--new-run": options.new_run,
        "--admit": bool(options.admit),
        "--stage": options.stage is not None,
    }
    if options.train is None:
        for name in filter(given.get, given):
            raise UsageError(f"{name} is of a training run: name the run with --train")
    elif options.device != "cpu":
        raise UsageError("--train: a peer that trains as well serves with --device cpu")


@dataclass
class SideRun:
    """A run that a peer takes part in beside the model that it serves."""

    config: RunPeerConfig
    identity: Identity
    num_bytes: int
    """Memory of the largest stage that it may hold, with the graphs of its passes."""
    _progress: dict[str, Any] = field(default_factory=dict[str, Any])

    def pass_on(self, report: Report) -> Report:
        """Return what reports events of the run, so that the status of the peer tells them too."""
        run = self.config.run

        def note(event: PeerEvent) -> None:
            if event.name == "update":
                now = {name: event.facts[name] for name in ("update", "loss")}
                self._progress = {"name": run.name, **now, "num_updates": run.num_updates}
            elif event.name == "training_stopped":
                self._progress = {}
            report(event)

        return note

    def read_progress(self) -> dict[str, Any]:
        """Return how far the run has come, for the status of the peer."""
        return {"run": self._progress} if self._progress else {}


@contextmanager
def choosing_side_run(
    options: argparse.Namespace, network: InternetNetwork, report: Report
) -> Generator[SideRun | None]:
    """Yield the run of the options as soon as the swarm shows it; None where a signal comes first.

    Holds the identity of the peer meanwhile. Raises UsageError for what `shoal train` refuses.
    """
    wanted = argparse.Namespace(
        **{**vars(options), "run_file": options.train, "threads": options.train_threads}
    )
    training, clock = load_own_run(wanted), network.clock
    records = list[RunRecord]()
    with hold_identity(options.identity) as identity:

        async def choose(stop: asyncio.Event, report: Report) -> None:
            records.append(await choose_record(wanted, training, identity, network, clock, report))

        with stop_on_sigterm(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_until_signalled(choose, report, options.end_with_stdin))
        if not records:
            yield None
            return
        config = make_config(wanted, records[0], is_beside=True)
        from ...peer.engine.training.run_plan import plan_run

        stages = plan_run(config.run).stages
        held = range(len(stages)) if config.stages is None else config.stages
        num_bytes = max(stages[one].memory_bytes for one in held) + config.graph_bytes
        yield SideRun(config, identity, num_bytes)
