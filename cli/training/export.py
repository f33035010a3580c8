"""`shoal export`: write the model of a training run, as it is after the newest update."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from ...peer.process.identity_file import load_or_create_identity
from ...protocol.errors import UnavailableError, UsageError
from ...protocol.identity import Identity
from ...protocol.net.clock import SystemClock
from ...protocol.net.dht.internet import InternetNetwork
from ...protocol.net.run_search import choose_run, fetch_records, is_name_or_id
from ...protocol.runs.run_record import RunRecord
from ..options.join_options import add_join_arguments, read_joining
from ..options.shared_options import add_identity_argument
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal
from .model_folder import check_folder, describe_held_out_loss, find_tokenizer, write_model

if TYPE_CHECKING:
    from .run_weights import RunWeights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal export`."""
    parser.add_argument("wanted", metavar="RUN", help="name or id of the run")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path,
        help="output folder for the model, in transformers' format",
    )  # fmt: skip
    parser.add_argument(
        "--corpus", metavar="FOLDER", type=Path,
        help="folder of the run's corpus; the tokenizer's files are copied from there",
    )  # fmt: skip
    add_join_arguments(parser)
    add_identity_argument(
        parser,
        "key file of the owner or of a peer that it admits, where not all peers may take part",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Write the model of a run that peers of a swarm train."""
    folder: Path = options.folder
    check_folder(folder)
    if not is_name_or_id(options.wanted):
        raise UsageError(f"RUN is the name or the id of a run, not {options.wanted!r}")
    joining = read_joining(options)
    network = InternetNetwork(SystemClock(), joining.addresses, joining.membership)
    # Not held: the peer whose identity it is may train meanwhile, on this machine too.
    path: Path | None = options.identity
    identity = Identity.generate() if path is None else load_or_create_identity(path)
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    with reporter.showing(lambda: "Fetching the weights"):
        with quitting_at_once(options.json), importing_much():
            from .run_weights import fetch_run_weights, visit_swarm

        async def fetch() -> tuple[RunRecord, dict[str, bytes], RunWeights]:
            async with visit_swarm(network, identity) as presence:
                found = await fetch_records(
                    options.wanted, presence.transport, presence.directory, network.clock
                )
                if not found:
                    raise UnavailableError(f"no peer of this swarm trains a run {options.wanted}")
                record = choose_run(options.wanted, found, identity.peer_id)
                files = find_tokenizer(record.run, options.corpus)
                return (
                    record,
                    files,
                    await fetch_run_weights(record, presence, network.clock, reporter.warn),
                )

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            record, tokenizer, fetched = runner.run(fetch())
        write_model(folder, record.run, fetched.architecture, fetched.weights, tokenizer)
    lines = [
        f"Run {record.run.name}, update {fetched.update} of {record.run.num_updates}",
        f"Model: {folder}",
        f"SHA-256 of its weights: {fetched.digest}",
    ]
    lacking = [file.path for file in record.run.corpus.tokenizer if file.path not in tokenizer]
    if lacking:
        lines.append(
            f"The tokenizer is not there: copy {', '.join(lacking)} from the folder of the corpus, "
            "or export with --corpus FOLDER."
        )
    if fetched.held_out_loss is not None:
        entropy = record.run.corpus.entropy
        lines.append(describe_held_out_loss(fetched.held_out_loss, entropy))
    reporter.tell(
        "exported", lines, name=record.run.name, run_id=record.run_id, update=fetched.update,
        num_updates=record.run.num_updates, loss=fetched.loss, model=str(folder),
        digest=fetched.digest, held_out_loss=fetched.held_out_loss, lacks_files=lacking,
    )  # fmt: skip
    return 0
