"""Chooses the run that a peer takes part in: its own, or one that others have begun."""

from __future__ import annotations

import argparse
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...peer.process.config import PeerEvent, Report
from ...protocol.errors import DirectoryError, UsageError
from ...protocol.identity import Identity
from ...protocol.net.clock import Clock
from ...protocol.net.network import Presence
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.run_search import Search, fetch_records, find_run, is_name_or_id
from ...protocol.runs.run_record import RunRecord, sign_run
from ...protocol.runs.training_run import TrainingRun
from .run_file import load_run

if TYPE_CHECKING:
    from ...models.token_shards import TokenShards
    from ...peer.runs.run_resources import RunPeerConfig

_PAUSES = Backoff(0.5, 30.0)
"""Between searches: a run may begin after those that are to join it."""


def founds_run(options: argparse.Namespace) -> bool:
    """Return whether the run begins here."""
    return bool(options.new_swarm or options.new_run)


def load_own_run(options: argparse.Namespace) -> TrainingRun | None:
    """Return the run of the run file; None where a run of the swarm is named in place of a file.

    Raises UsageError where options contradict, or what is wrong with the file.
    """
    if options.admit and not founds_run(options):
        raise UsageError("--admit: who may take part is said where the run begins")
    is_named = is_name_or_id(str(options.run_file)) and not options.run_file.is_file()
    if is_named and not founds_run(options):
        if options.corpus is None:
            raise UsageError("give --corpus FOLDER, the folder of the corpus shards of the run")
        return None
    run = load_run(options.run_file, options.admit)
    check_stage(options, run)
    return run


def check_stage(options: argparse.Namespace, run: TrainingRun) -> None:
    """Raise UsageError unless the run has the stage that the options name."""
    num_stages = len(run.stage_borders) + 1
    if options.stage is not None and not 0 <= options.stage < num_stages:
        raise UsageError(f"--stage: the run has stages 0 to {num_stages - 1}, not {options.stage}")


async def choose_record(
    options: argparse.Namespace, own: TrainingRun | None, identity: Identity, search: Search
) -> RunRecord | None:
    """Sign our own run if it begins here, or find the run in the swarm; None where nobody shows it.

    Raises UsageError where that is another run than our own, or does not admit us.
    """
    if own is not None and founds_run(options):
        record = sign_run(identity, own, options.admit)
        if not options.new_swarm and await search(record.run_id):
            raise UsageError(f"the run {own.name} is under way already: leave out --new-run")
        return record
    record = await find_run(_name_run(options, own), identity.peer_id, search, own)
    if record is not None and own is not None and record.run != own:
        differing = [
            name for name in TrainingRun.model_fields
            if getattr(own, name) != getattr(record.run, name)
        ]  # fmt: skip
        raise UsageError(
            f"the run {own.name} of this swarm differs from {options.run_file} in "
            f"{', '.join(differing)}: its id is {record.run_id}"
        )
    return record


async def wait_for_record(
    options: argparse.Namespace,
    own: TrainingRun | None,
    presence: Presence,
    clock: Clock,
    report: Report,
) -> RunRecord:
    """Return what `choose_record` does, as soon as a peer of the swarm shows the run.

    Reports `waiting_for` once.
    """
    search = partial(
        fetch_records, transport=presence.transport, directory=presence.directory, clock=clock
    )
    attempts = Retry(_PAUSES, clock)
    while True:
        with suppress(DirectoryError):  # which may change
            record = await choose_record(options, own, presence.identity, search)
            if record is not None:
                return record
        if not attempts.num_failures:
            name = _name_run(options, own)
            what = f"a peer that shows the run {name}; `shoal monitor --once` lists those there are"
            report(PeerEvent("waiting_for", {"what": what}))
        attempts.note_failure()
        await attempts.pause()


def _name_run(options: argparse.Namespace, own: TrainingRun | None) -> str:
    return str(options.run_file) if own is None else own.name


def make_config(
    options: argparse.Namespace,
    record: RunRecord,
    shards: TokenShards | None = None,
    *,
    is_beside: bool = False,
) -> RunPeerConfig:
    """Return the settings of a peer of a run. Raises UsageError where no stage fits, or the corpus
    is not that of the run.

    `shards`: its corpus, if that is open already. `is_beside`: beside what the process serves.
    """
    from ...peer.hosting.hosted_model import read_free_bytes
    from ...peer.runs.run_resources import RunPeerConfig

    stages, graph_bytes = choose_stages(options, record.run, is_beside=is_beside)
    return RunPeerConfig(
        record,
        choose_corpus_folder(options),
        stages,
        founds_run=founds_run(options),
        num_threads=options.run_threads,
        graph_bytes=graph_bytes,
        read_free_bytes=None if is_beside else read_free_bytes,  # blocks leave so much free
        announce_period_seconds=options.announce_period,
        silence_seconds=options.silence,
        linger_seconds=options.linger,
        shards=shards or open_corpus(options, record.run),
    )


def open_corpus(options: argparse.Namespace, run: TrainingRun) -> TokenShards:
    """Open the files of a corpus. Raises UsageError where one is not that of the run."""
    from ...models.token_shards import TokenShards
    from ...peer.engine.training.run_plan import plan_run

    return TokenShards.open(
        run.corpus, choose_corpus_folder(options), plan_run(run).vocabulary_size
    )


def choose_corpus_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the corpus: that of the run file unless --corpus names another."""
    return options.corpus or options.run_file.parent


def choose_stages(
    options: argparse.Namespace, run: TrainingRun, *, is_beside: bool = False
) -> tuple[list[int], int]:
    """Return which stages fit into free memory, and what of it graphs of passes may take.

    Raises UsageError where none fits, or where this machine lacks what the run needs.
    """
    from ...peer.engine.training.run_plan import plan_run
    from ...peer.engine.training.trainable_span import check_machine
    from ...peer.hosting.hosted_model import read_free_bytes

    check_stage(options, run)
    check_machine(run)
    plan, free_bytes = plan_run(run), read_free_bytes()
    stages = range(len(plan.stages)) if options.stage is None else (options.stage,)
    fitting = plan.list_fitting(stages, free_bytes)
    return fitting, plan.choose_graph_bytes(fitting, free_bytes, is_beside=is_beside)
