"""`shoal train`: train a model from scratch, in this process or as one peer of many."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
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
from .model_folder import check_folder, keep_writing, write_losses, write_model
from .run_choice import (
    choose_stages,
    load_own_run,
    make_config,
    open_corpus,
    wait_for_record,
)
from .run_events import choose_report
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
    add_peer_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")


def run(options: argparse.Namespace) -> int:
    """Train a run in this process, or a stage of it with others."""
    out: Path | None = options.out
    if out is not None:
        check_folder(out)
    if is_peer(options):
        return _train_together(options)
    if out is None:
        raise UsageError(
            "give --out FOLDER to train in this process, or --new-swarm or --join CODE to train "
            "with others"
        )
    for name in ("metrics", "identity", "stage", "admit"):
        if getattr(options, name) not in (None, []):
            raise UsageError(f"--{name} is for a peer that trains with others")
    return train_alone(options, out)


def _train_together(options: argparse.Namespace) -> int:
    """Train a stage of a run that begins here, or of one that others have begun."""
    training = load_own_run(options)
    network = make_network(options)
    clock = network.clock
    losses, held_out, told = dict[int, float](), dict[int, float](), set[str]()
    with quitting_at_once(options.json), importing_much():  # seconds of torch
        from torch import set_num_threads

        from ...peer.operating.operation import MetricsEndpoint
        from ...peer.runs.run_peer import RunPeer, open_run
        from ...peer.streams.service import JoinedPeer

    set_num_threads(options.run_threads)  # of sums and digests too, not only of passes
    shards = None
    if training is not None:  # too little memory and a wrong corpus are told before joining
        choose_stages(options, training)
        shards = open_corpus(options, training)

    async def train(stop: asyncio.Event, tell: Report) -> None:
        def report(event: PeerEvent) -> None:
            if event.name in ("update", "held_out"):
                listed = losses if event.name == "update" else held_out
                listed[int(str(event.facts["update"]))] = float(str(event.facts["loss"]))
            told.add(event.name)
            metrics.run.note(event)
            tell(event)

        async with AsyncExitStack() as stack:
            identity = stack.enter_context(hold_identity(options.identity))
            joining = JoinedPeer.join(network, identity, clock, report)
            joined = await stack.enter_async_context(joining)
            counts = joined.handler.counts
            await stack.enter_async_context(metrics.serve(lambda: counts, report))
            record = await wait_for_record(options, training, joined.presence, clock, report)
            config = await asyncio.to_thread(make_config, options, record, shards)
            resources = await stack.enter_async_context(open_run(config, clock))
            peer = await stack.enter_async_context(RunPeer.join(joined, resources, clock, report))
            report(PeerEvent("online", peer.describe()))
            may_drain = not options.end_with_stdin  # nobody is there to hurry it
            keep = partial(keep_writing, clock=clock, report=report)
            finish = partial(_finish, peer, options.out, losses, held_out, keep, report)
            await peer.serve(peer.finish_or_leave(finish, stop, may_drain))
            if peer.loop.failure is not None:
                raise RefusedError(ErrorCode.BAD_VALUES, peer.loop.failure)

    report = choose_report(options.json)
    with (
        MetricsEndpoint.prepare(options.metrics) as metrics,
        stop_on_sigterm(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        was_online = runner.run(run_until_signalled(train, report, options.end_with_stdin))
    has_what_it_wanted = was_online if options.out is None else "trained" in told
    return 0 if has_what_it_wanted else INTERRUPTED


async def _finish(
    peer: RunPeer,
    folder: Path | None,
    losses: Mapping[int, float],
    held_out: Mapping[int, float],
    keep_writing: Callable[[Callable[[], None]], Awaitable[None]],
    report: Report,
) -> None:
    await peer.loop.is_over.wait()
    if peer.loop.failure is not None:
        await peer.linger()
        return
    facts: dict[str, object] = {}
    if folder is not None:
        weights, digest = await peer.loop.fetch_weights()
        training, architecture = peer.resources.run, peer.resources.architecture
        tokenizer = peer.resources.shards.tokenizer
        write = partial(write_model, folder, training, architecture, weights, tokenizer)
        await keep_writing(write)
        await keep_writing(partial(write_losses, folder, training, losses, held_out))
        facts = {"model": str(folder), "digest": digest}
    facts["held_out_loss"] = held_out.get(peer.resources.run.num_updates)
    report(PeerEvent("trained", facts))
    await peer.linger()
