"""`shoal models`: list what a swarm serves, how completely and how fast."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from ...protocol.errors import UnavailableError
from ..options.join_options import add_join_arguments, quote_command, read_joining
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from ...client.doctor.served_models import ServedModel

_ID_CHARACTERS = 8  # of a model id in the table; --json has the whole
_MAX_GAPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal models`."""
    add_join_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """List the models of a swarm; raises UnavailableError when there are none."""
    joining = read_joining(options)
    with Progress(Terminal(sys.stderr), lambda: "Asking the swarm"):
        with quitting_at_once(options.json), importing_much():
            from ...client.doctor.probes import make_network_probes
            from ...client.doctor.served_models import find_served_models

        async def find() -> "list[ServedModel]":
            probes = make_network_probes(joining.membership)
            joined = await probes.join(joining.addresses)
            try:
                return await find_served_models(joined, probes)
            finally:
                await joined.transport.close()
                await joined.directory.close()

        models = asyncio.run(find())
    if not models:
        raise UnavailableError(
            "no peer of this swarm lists a model: start one with `shoal serve MODEL --join CODE`; "
            "peers of older versions are not listed, see `shoal doctor MODEL --join CODE`"
        )
    terminal = Terminal(sys.stdout)
    if options.json:
        terminal.print_json({"models": [_make_json(model, options) for model in models]})
    else:
        _show(models, options, terminal)
    return 0


def _show(models: "list[ServedModel]", options: argparse.Namespace, terminal: Terminal) -> None:
    rows = [("model", "id", "blocks", "peers", "replicas", "tokens/s")]
    for model in models:
        speed = model.tokens_per_second
        digits = ".3g" if speed is None or speed < 1000 else ".0f"
        rows.append(
            (
                model.name or "?",
                model.view.model_id[:_ID_CHARACTERS],
                _describe_blocks(model),
                str(len(model.view.online)),
                str(model.num_replicas),
                "-" if speed is None else f"about {speed:{digits}}",
            )
        )
    terminal.print_table(rows)
    for model in models:
        if model.num_unasked:
            num_asked = len(model.view.online) + model.num_silent
            of_all = f"{num_asked} of {num_asked + model.num_unasked} asked"
            terminal.print(f"{model.view.model_id[:_ID_CHARACTERS]}: {of_all}")
    commands = [command for model in models if (command := _make_command(model, options))]
    if commands:
        terminal.print()
    for command in commands:
        terminal.print(f" {command}")


def _describe_blocks(model: "ServedModel") -> str:
    num_blocks = model.view.num_blocks
    if model.is_complete:
        return f"all {num_blocks}"
    gaps = model.view.gaps
    more = f" and {len(gaps) - _MAX_GAPS} more" if len(gaps) > _MAX_GAPS else ""
    return f"{num_blocks}, without {', '.join(map(str, gaps[:_MAX_GAPS]))}{more}"


def _make_command(model: "ServedModel", options: argparse.Namespace) -> str:
    """Return how to use a model; empty if it cannot be."""
    if not (model.is_complete and model.name):
        return ""
    command = f'shoal generate {model.name} "Once upon a time"'
    return quote_command(command, options.initial_peers, options.join)


def _make_json(model: "ServedModel", options: argparse.Namespace) -> dict[str, object]:
    view, speed = model.view, model.tokens_per_second
    return {
        "model": model.name or None,
        "model_id": view.model_id,
        "num_blocks": view.num_blocks,
        "missing": [str(span) for span in view.gaps],
        "peers": len(view.online),
        "silent_peers": model.num_silent,
        "unasked_peers": model.num_unasked,
        "replicas": model.num_replicas,
        "tokens_per_second": None if speed is None else round(speed, 2),
        "command": _make_command(model, options) or None,
    }
