"""`shoal train`: train a model from scratch, in this process or as one peer of many."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from ...peer.process.config import PeerEvent, Report
from ...peer.process.identity_file import hold_identity
from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ...protocol.runs.run_record import RunRecord
from ..options.serve_options import make_network
from ..terminal.interrupts import INTERRUPTED, stop_on_sigterm
from ..terminal.signalled import RunPeerUntil, run_until_signalled
from .model_folder import write_losses, write_model
from .run_choice import choose_record, load_own_run, make_config
from .run_events import choose_report
from .run_file import load_run
from .train_alone import train_alone
from .train_options import add_peer_arguments, is_peer

if TYPE_CHECKING:
    from ...peer.runs.run_peer import RunPeer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal train`."""
    parser.add_argument(
        "run_file", metavar="RUN", type=Path,
        help="run file (TOML); with --join, also the name or id of a run",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="output folder for the model, in transformers' format; a peer of a run with others "
        "needs none",
    )  # fmt: skip
    parser.add_argument(
        "--corpus", type=Path, metavar="FOLDER",
        help="folder of the corpus shards (default: that of the run file)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    add_peer_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")


def run(options: argparse.Namespace) -> int:
    """Train a run in this process, or a stage of it with others."""
    if options.threads < 1:
        raise UsageError(f"--threads must be at least 1, not {options.threads}")
    out: Path | None = options.out
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no folder")
    if is_peer(options):
        return _train_together(options)
    training = load_run(options.run_file)
    if out is None:
        raise UsageError(
            "give --out FOLDER to train in this process, or --new-swarm or --join CODE to train "
            "with others"
        )
    return train_alone(options, training, out)


def _train_together(options: argparse.Namespace) -> int:
    """Train a stage of a run that begins here, or of one that others have begun."""
    training = load_own_run(options)
    network = make_network(options)
    clock = network.clock
    records = list[RunRecord]()
    losses, held_out = dict[int, float](), dict[int, float]()
    with hold_identity(options.identity) as identity:

        async def choose(stop: asyncio.Event, report: Report) -> None:
            records.append(await choose_record(options, training, identity, network, clock, report))

        _run(options, choose)
        if not records:
            return INTERRUPTED
        (record,) = records
        config = make_config(options, record)
        from ...peer.runs.run_peer import RunPeer

        async def train(stop: asyncio.Event, tell: Report) -> None:
            def report(event: PeerEvent) -> None:
                if event.name in ("update", "held_out"):
                    listed = losses if event.name == "update" else held_out
                    listed[int(str(event.facts["update"]))] = float(str(event.facts["loss"]))
                tell(event)

            joining = RunPeer.join(config, network, clock, report, identity=identity)
            async with joining as peer:
                facts = {"name": record.run.name, "owner": record.owner, "run_id": record.run_id}
                report(PeerEvent("online", facts))
                may_drain = not options.end_with_stdin  # nobody is there to hurry it
                finish = partial(_finish, peer, options.out, losses, held_out, report)
                await peer.serve(peer.finish_or_leave(finish, stop, may_drain))
                if peer.loop.failure is not None:
                    raise RefusedError(ErrorCode.BAD_VALUES, peer.loop.failure)

        return 0 if _run(options, train) else INTERRUPTED


def _run(options: argparse.Namespace, work: RunPeerUntil) -> bool:
    """Do something until it ends, or a signal ends it; return whether the peer was online."""
    report = choose_report(options.json)
    with stop_on_sigterm(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_until_signalled(work, report, options.end_with_stdin))


async def _finish(
    peer: RunPeer,
    folder: Path | None,
    losses: Mapping[int, float],
    held_out: Mapping[int, float],
    report: Report,
) -> None:
    await peer.loop.wait_until_over()
    if peer.loop.failure is not None:
        await peer.linger()
        return
    facts: dict[str, object] = {}
    if folder is not None:
        weights, digest = await peer.loop.fetch_weights()
        training, architecture = peer.resources.run, peer.resources.architecture
        await asyncio.to_thread(write_model, folder, training, architecture, weights)
        await asyncio.to_thread(write_losses, folder, training, losses, held_out)
        facts = {"model": str(folder), "digest": digest}
    facts["held_out_loss"] = held_out.get(peer.resources.run.num_updates)
    report(PeerEvent("trained", facts))
    await peer.linger()
