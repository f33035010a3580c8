"""`shoal train`: train a model from scratch, in this process or as one peer of many."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from ...peer.process.config import PeerEvent, Report
from ...peer.process.identity_file import hold_identity
from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ..options.serve_options import make_network
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import INTERRUPTED, quitting_at_once, stop_on_sigterm
from ..terminal.signalled import run_until_signalled
from .model_folder import write_losses, write_model
from .run_events import choose_report
from .run_file import load_run
from .train_alone import train_alone
from .train_options import add_peer_arguments, is_peer
from .train_plan import check_memory

if TYPE_CHECKING:
    from ...peer.runs.run_peer import RunPeer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal train`."""
    parser.add_argument("run_file", metavar="RUN", type=Path, help="run file (TOML)")
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
    training = load_run(options.run_file)
    if options.threads < 1:
        raise UsageError(f"--threads must be at least 1, not {options.threads}")
    out: Path | None = options.out
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no folder")
    if not is_peer(options):
        if out is None:
            raise UsageError(
                "give --out FOLDER to train in this process, or --new-swarm or --join CODE to "
                "train with others"
            )
        return train_alone(options, training, out)
    num_stages = len(training.stage_borders) + 1
    if options.stage is not None and not 0 <= options.stage < num_stages:
        raise UsageError(f"--stage: the run has stages 0 to {num_stages - 1}, not {options.stage}")
    network = make_network(options)
    report = choose_report(options.json)
    with quitting_at_once(options.json), importing_much():  # seconds of torch
        check_memory(training, options.stage)
        from torch import set_num_threads

        from ...peer.runs.run_peer import RunPeer
        from ...peer.runs.run_resources import RunPeerConfig

    set_num_threads(options.threads)  # of sums and digests too, not only of passes
    config = RunPeerConfig(
        training,
        options.corpus or options.run_file.parent,
        options.stage,
        founds_run=options.new_swarm,
        num_threads=options.threads,
        announce_period_seconds=options.announce_period,
        silence_seconds=options.silence,
        linger_seconds=options.linger,
    )

    losses = dict[int, float]()

    async def train(stop: asyncio.Event, tell: Report) -> None:
        def report(event: PeerEvent) -> None:
            if event.name == "update":
                losses[int(str(event.facts["update"]))] = float(str(event.facts["loss"]))
            tell(event)

        with hold_identity(options.identity) as identity:
            joining = RunPeer.join(config, network, network.clock, report, identity=identity)
            async with joining as peer:
                report(PeerEvent("online", {"run_id": training.run_id}))
                may_drain = not options.end_with_stdin  # nobody is there to hurry it
                await peer.serve(_end(peer, options.out, losses, stop, may_drain, report))
                if peer.loop.failure is not None:
                    raise RefusedError(ErrorCode.BAD_VALUES, peer.loop.failure)

    with stop_on_sigterm(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        was_online = runner.run(run_until_signalled(train, report, options.end_with_stdin))
    return 0 if was_online else INTERRUPTED


async def _end(
    peer: RunPeer,
    folder: Path | None,
    losses: Mapping[int, float],
    stop: asyncio.Event,
    may_drain: bool,
    report: Report,
) -> None:
    """Wait until the run is over and nobody needs us, and write its model; or leave at `stop`."""

    async def leave() -> None:
        await stop.wait()
        if may_drain:
            await peer.leave()

    finishing = asyncio.create_task(_finish(peer, folder, losses, report))
    ends = [finishing, asyncio.create_task(leave())]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)
    for end in done:
        end.result()


async def _finish(
    peer: RunPeer, folder: Path | None, losses: Mapping[int, float], report: Report
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
        await asyncio.to_thread(write_losses, folder, training, losses)
        facts = {"model": str(folder), "digest": digest}
    report(PeerEvent("trained", facts))
    await peer.linger()
