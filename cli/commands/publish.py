"""`shoal publish`: keep an adapter published until Ctrl-C."""

import argparse
import contextlib
import logging
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import RouteError
from ..options.adapter_folder import check_lora
from ..options.bundled_model import find_model
from ..options.join_options import add_join_arguments, quote_command, read_joining
from ..options.shared_options import add_model_argument, add_wait_argument
from ..remote_models.opening import import_client, open_model
from ..terminal.interrupts import quitting_at_once, stop_on_sigterm
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal

if TYPE_CHECKING:
    from ...client.model.causal_lm import DistributedCausalLM
    from ...client.training.lora import LoraAdapter

_CLIENT = "shoal.client"
"""The name that the client's warnings are logged under."""

_LOOK_SECONDS = 1.0
"""The time between two looks for peers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal publish`."""
    parser.description = (
        "Publish an adapter to a swarm and print its digest. Anyone in the swarm can use it by "
        "that digest while this command runs."
    )
    add_model_argument(parser)
    parser.add_argument(
        "folder", type=Path, metavar="DIR",
        help="LoRA adapter: --out of `shoal finetune` (--method lora), or a folder saved by PEFT",
    )  # fmt: skip
    add_join_arguments(parser)
    add_wait_argument(parser, 0.0)
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def run(options: argparse.Namespace) -> int:
    """Publish an adapter until Ctrl-C or SIGTERM; return 0.

    Raises KeyboardInterrupt if that comes before peers have the adapter.
    """
    check_lora(options.folder)
    joining, name = read_joining(options), find_model(options.model)
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    with stop_on_sigterm():
        with reporter.showing(lambda: "Opening the model"):
            with quitting_at_once(options.json):
                import_client()
            # The peers are found when they are used.
            model = open_model(name, joining.initial_peers, join=joining.join)
        with _telling_warnings(reporter.warn) as warnings, model:
            from ...client.training.lora import LoraAdapter

            adapter = LoraAdapter.load(options.folder, model)
            with reporter.showing(lambda: "Sending the adapter to peers"):
                digest = _publish(model, adapter, options.wait)
            with contextlib.suppress(KeyboardInterrupt):
                _report_published(reporter, options, digest, not warnings.has_told)
                threading.Event().wait()
            with reporter.showing(lambda: "Withdrawing the adapter"):
                model.withdraw_adapter(digest)
    _report_withdrawn(reporter, digest)
    return 0


def _publish(model: "DistributedCausalLM", adapter: "LoraAdapter", wait_seconds: float) -> str:
    """Publish an adapter and return its digest; wait so long for peers that can hold it."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return model.publish_adapter(adapter)
        except RouteError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_SECONDS)


class _Warnings(logging.Handler):
    """Passes on each warning of the client once; closing a model repeats some of them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told = set[str]()

    @property
    def has_told(self) -> bool:
        """Whether there was a warning."""
        return bool(self._told)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a warning, unless it was passed on before."""
        sentence = record.getMessage()
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)


@contextlib.contextmanager
def _telling_warnings(tell: Callable[[str], None]) -> Iterator[_Warnings]:
    """Report the warnings of the client while inside, instead of logging them."""
    logger, handler = logging.getLogger(_CLIENT), _Warnings(tell)
    logger.addHandler(handler)
    logger.propagate, before = False, logger.propagate
    try:
        yield handler
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def _report_published(
    reporter: Reporter, options: argparse.Namespace, digest: str, is_complete: bool
) -> None:
    """Say that the adapter is published, and how others use it.

    `is_complete` is False while peers for some blocks do not have it.
    """
    command = f'shoal generate {shlex.quote(options.model)} "Once upon a time" --adapter {digest}'
    use = quote_command(command, options.initial_peers, options.join)
    output = reporter.output
    when = "" if is_complete else ", once peers for all blocks have it"
    said = f"{options.folder} is published. Anyone in the swarm can use it by its digest{when}:"
    lines = [
        *(output.paint(line, "bold") for line in output.wrap(said)),
        "",
        f"  {use}",
        "",
        "From Python: from_pretrained(…, active_adapter=DIGEST)",
        "Press Ctrl-C to withdraw it.",
    ]
    reporter.tell(
        "published",
        lines,
        digest=digest,
        adapter=str(options.folder),
        use=use,
        is_complete=is_complete,
    )


def _report_withdrawn(reporter: Reporter, digest: str) -> None:
    reporter.tell("withdrawn", ["\nThe adapter is withdrawn."], digest=digest)
