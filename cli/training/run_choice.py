"""Chooses the run that a peer takes part in: its own, or one that others have begun."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ...peer.process.config import PeerEvent, Report
from ...protocol.errors import UsageError
from ...protocol.identity import Identity
from ...protocol.net.clock import Clock
from ...protocol.net.network import Network
from ...protocol.net.run_search import find_run, search_runs
from ...protocol.runs.run_record import RunRecord, sign_run
from ...protocol.runs.training_run import TrainingRun
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from .run_file import load_run

if TYPE_CHECKING:
    from ...peer.runs.run_resources import RunPeerConfig

_NAME_OR_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}|[0-9a-f]{64}")


def founds_run(options: argparse.Namespace) -> bool:
    """Return whether the run begins here."""
    return bool(options.new_swarm or options.new_run)


def load_own_run(options: argparse.Namespace) -> TrainingRun | None:
    """Return the run of the run file; None where a run of the swarm is named in place of a file.

    Raises UsageError where options contradict, or what is wrong with the file.
    """
    if options.admit and not founds_run(options):
        raise UsageError("--admit: who may take part is said where the run begins")
    is_named = _NAME_OR_ID.fullmatch(str(options.run_file)) and not options.run_file.is_file()
    if is_named and not founds_run(options):
        if options.corpus is None:
            raise UsageError("give --corpus FOLDER, the folder of the corpus shards of the run")
        return None
    run = load_run(options.run_file)
    check_stage(options, run)
    return run


def check_stage(options: argparse.Namespace, run: TrainingRun) -> None:
    """Raise UsageError unless the run has the stage that the options name."""
    num_stages = len(run.stage_borders) + 1
    if options.stage is not None and not 0 <= options.stage < num_stages:
        raise UsageError(f"--stage: the run has stages 0 to {num_stages - 1}, not {options.stage}")


async def choose_record(
    options: argparse.Namespace,
    own: TrainingRun | None,
    identity: Identity,
    network: Network,
    clock: Clock,
    report: Report,
) -> RunRecord:
    """Sign our own run if it begins here, or find the run in the swarm.

    Raises UsageError where that is another run than our own, or does not admit us.
    """
    if own is not None and founds_run(options):
        record = sign_run(identity, own, options.admit)
        if not options.new_swarm and await search_runs(record.run_id, network, clock):
            raise UsageError(f"the run {own.name} is under way already: leave out --new-run")
        return record
    wanted = str(options.run_file) if own is None else own.name

    def note_waiting(what: str) -> None:
        report(PeerEvent("waiting_for", {"what": what}))

    record = await find_run(wanted, identity.peer_id, network, clock, note_waiting, own)
    if own is not None and record.run != own:
        differing = [
            name for name in TrainingRun.model_fields
            if getattr(own, name) != getattr(record.run, name)
        ]  # fmt: skip
        raise UsageError(
            f"the run {own.name} of this swarm differs from {options.run_file} in "
            f"{', '.join(differing)}: its id is {record.run_id}"
        )
    return record


def make_config(
    options: argparse.Namespace, record: RunRecord, *, is_beside: bool = False
) -> RunPeerConfig:
    """Import what trains, and return its settings. Raises UsageError where no stage fits.

    `is_beside`: beside what the process serves, whose threads are its own.
    """
    check_stage(options, record.run)
    with quitting_at_once(options.json), importing_much():  # seconds of torch
        from torch import set_num_threads

        from ...peer.engine.training.run_plan import plan_run
        from ...peer.hosting.hosted_model import read_free_bytes
        from ...peer.runs.run_resources import RunPeerConfig

    plan = plan_run(record.run)
    stages = range(len(plan.stages)) if options.stage is None else (options.stage,)
    free_bytes = read_free_bytes()
    fitting = plan.list_fitting(stages, free_bytes)
    if not is_beside:
        set_num_threads(options.threads)  # of sums and digests too, not only of passes
    return RunPeerConfig(
        record,
        options.corpus or options.run_file.parent,
        fitting,
        founds_run=founds_run(options),
        num_threads=options.threads,
        graph_bytes=plan.choose_graph_bytes(fitting, free_bytes, is_beside=is_beside),
        announce_period_seconds=options.announce_period,
        silence_seconds=options.silence,
        linger_seconds=options.linger,
    )
