"""The run in which a peer of `shoal serve` takes part, beside the model that it serves."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...peer.process.config import Report
from ...protocol.errors import DirectoryError, UsageError
from ...protocol.identity import Identity
from ...protocol.net.clock import Clock
from ...protocol.net.network import Network, Presence
from ...protocol.net.run_search import search_runs
from ...protocol.runs.run_record import RunRecord
from .run_choice import choose_record, load_own_run, make_config, open_corpus, wait_for_record
from .train_options import add_member_arguments

if TYPE_CHECKING:
    from ...models.token_shards import TokenShards
    from ...peer.runs.run_resources import RunPeerConfig


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run beside the model that is served."""
    group = parser.add_argument_group("training", "a training run to take part in as well")
    group.add_argument(
        "--train", type=Path, dest="run_file", metavar="RUN",
        help="name or id of a run of the swarm, or a run file; the run begins here with --new-run "
        "or --new-swarm",
    )  # fmt: skip
    add_member_arguments(group, "--train-threads")


def check_training_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options of a run that do not fit."""
    given = {
        "--corpus": options.corpus is not None,
        "--new-run": options.new_run,
        "--admit": bool(options.admit),
        "--stage": options.stage is not None,
    }
    if options.run_file is None:
        for name in filter(given.get, given):
            raise UsageError(f"{name} is of a training run: name the run with --train")
    elif options.device != "cpu":
        raise UsageError("--train: a peer that trains as well serves with --device cpu")


class SideRun:
    """A run that a peer takes part in beside the model that it serves."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises UsageError for options of a run, or a run file, that are wrong."""
        self._options = options
        self._own = load_own_run(options)
        self._shards: TokenShards | None = None
        self._config: RunPeerConfig | None = None

    async def prepare(self, network: Network, identity: Identity, clock: Clock) -> int:
        """Choose the run if it begins here, or if a peer of the swarm shows it by now.

        Returns the memory to keep free, for the largest stage that the peer may hold with the
        graphs of its passes; 0: nobody shows the run yet. Raises UsageError for a run that does not
        take us.
        """
        from ...peer.engine.training.run_plan import plan_run

        if self._own is not None:
            self._shards = await asyncio.to_thread(open_corpus, self._options, self._own)
        search = partial(search_runs, network=network, clock=clock)
        with suppress(DirectoryError):
            record = await choose_record(self._options, self._own, identity, search)
            if record is not None:
                self._config = config = await self._configure(record)
                plan = await asyncio.to_thread(plan_run, config.run)
                held = range(len(plan.stages)) if config.stages is None else config.stages
                return max(plan.stages[one].memory_bytes for one in held) + config.graph_bytes
        return 0

    async def find_config(self, presence: Presence, clock: Clock, report: Report) -> RunPeerConfig:
        """Return the settings of the peer in the run, as soon as a peer of the swarm shows that.

        Reports `waiting_for`. Raises UsageError for what `shoal train` refuses.
        """
        if self._config is not None:
            return self._config
        record = await wait_for_record(self._options, self._own, presence, clock, report)
        return await self._configure(record)

    async def _configure(self, record: RunRecord) -> RunPeerConfig:
        return await asyncio.to_thread(
            make_config, self._options, record, self._shards, is_beside=True
        )
