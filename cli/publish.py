"""`shoal publish`: keep an adapter published until Ctrl-C."""

import argparse
import contextlib
import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal.adapter_folder import check_lora
from .terminal.bundled_model import BUNDLED_NAME, find_model
from .terminal.interrupts import end_in_good_order, quitting_at_once
from .terminal.joining import Joining, add_join_arguments, quote_swarm, read_joining
from .terminal.terminal import Progress, Terminal
from .terminal.text_generation import import_client

if TYPE_CHECKING:
    from ..client.model.causal_lm import DistributedCausalLM

_CLIENT = "shoal.client"
"""The name that the client's warnings are logged under."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal publish`."""
    parser.description = (
        "Publish an adapter to all peers of a swarm, including peers that join later, and print "
        "its digest. Anyone in the swarm can use it by that digest while this command runs."
    )
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"model directory, Hub id, or {BUNDLED_NAME}, which comes with shoal",
    )  # fmt: skip
    parser.add_argument(
        "folder", type=Path, metavar="DIR",
        help="LoRA adapter: --out of `shoal finetune --method lora`, or a folder saved by PEFT",
    )  # fmt: skip
    add_join_arguments(parser, "address of a peer, as printed by `shoal serve` and `shoal swarm`")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def run(options: argparse.Namespace) -> int:
    """Publish an adapter until asked to end; return 0.

    Asked before peers keep it, it raises KeyboardInterrupt.
    """
    check_lora(options.folder)
    joining, name = read_joining(options), find_model(options.model)
    reporter = (_JsonReporter if options.json else _Reporter)(Terminal(sys.stdout))
    with end_in_good_order():
        with reporter.showing("Joining the swarm"):
            model = _open_model(name, joining)
        with _telling_warnings(reporter.warn) as warnings, model:
            from ..client import LoraAdapter

            adapter = LoraAdapter.load(options.folder, model)
            with reporter.showing("Sending the adapter to peers"):
                digest = model.publish_adapter(adapter)
            with contextlib.suppress(KeyboardInterrupt):
                reporter.report_published(_Published(options, digest, not warnings.has_told))
                threading.Event().wait()
            with reporter.showing("Withdrawing the adapter"):
                model.withdraw_adapter(digest)
    reporter.report_withdrawn(digest)
    return 0


def _open_model(name: str, joining: Joining) -> "DistributedCausalLM":
    """Return a model; its peers are found when it is used."""
    with quitting_at_once():
        import_client()
    from ..client import AutoDistributedModelForCausalLM

    return AutoDistributedModelForCausalLM.from_pretrained(
        name, initial_peers=list(joining.initial_peers), join=joining.join
    )


class _Warnings(logging.Handler):
    """Hands on what the client warns of, once: to close a model repeats what was not withdrawn."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told = set[str]()

    @property
    def has_told(self) -> bool:
        """Whether there was anything to warn of."""
        return bool(self._told)

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a warning, unless it was told before."""
        sentence = record.getMessage()
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)


@contextlib.contextmanager
def _telling_warnings(tell: Callable[[str], None]) -> Iterator[_Warnings]:
    """Tell what the client warns of, inside, in place of lines of a log."""
    logger, handler = logging.getLogger(_CLIENT), _Warnings(tell)
    logger.addHandler(handler)
    logger.propagate, before = False, logger.propagate
    try:
        yield handler
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


@dataclass(frozen=True)
class _Published:
    """What peers keep now, and of which command."""

    options: argparse.Namespace
    digest: str
    is_complete: bool
    """Whether there are peers for all blocks, and nothing else that the client warned of."""

    @property
    def use(self) -> Sequence[str]:
        """The lines of a command that uses it."""
        model = shlex.quote(self.options.model)
        swarm = quote_swarm(self.options.initial_peers, self.options.join)
        words = [f'shoal generate {model} "Once upon a time"', f"  --adapter {self.digest}"]
        words += [f"  {swarm}"] if swarm else []
        return [f"{word} \\" for word in words[:-1]] + words[-1:]


class _Reporter:
    """Tells people what goes on."""

    def __init__(self, output: Terminal) -> None:
        self._output = output
        self._notices = Terminal(sys.stderr)
        self._line = Progress(self._notices, str)

    @contextlib.contextmanager
    def showing(self, sentence: str) -> Iterator[None]:
        """Show, while inside, what is under way."""
        self._line = Progress(self._notices, lambda: sentence)
        with self._line:
            yield

    def warn(self, sentence: str) -> None:
        """Say what the client warns of."""
        with self._line.making_room():
            for line in self._notices.wrap(f"{sentence[:1].upper()}{sentence[1:]}."):
                self._notices.print(self._notices.paint(line, "yellow"))

    def report_published(self, published: _Published) -> None:
        """Say how others use it."""
        show, paint = self._output.print, self._output.paint
        folder = published.options.folder
        when = "" if published.is_complete else ", once peers for all blocks have it"
        said = f"{folder} is published. Anyone in the swarm can use it by its digest{when}:"
        for line in self._output.wrap(said):
            show(paint(line, "bold"))
        show()
        for line in published.use:
            show(f"  {line}")
        show()
        show("From Python: from_pretrained(…, active_adapter=DIGEST)")
        show("Press Ctrl-C to withdraw it.")

    def report_withdrawn(self, digest: str) -> None:
        """Say that nobody finds it any more."""
        self._output.print("\nThe adapter is withdrawn.")


class _JsonReporter(_Reporter):
    """The same as JSON lines."""

    def warn(self, sentence: str) -> None:
        self._print_event("warning", text=sentence)

    def report_published(self, published: _Published) -> None:
        use = " ".join(line.removesuffix("\\").strip() for line in published.use)
        folder = str(published.options.folder)
        facts = {"adapter": folder, "use": use, "is_complete": published.is_complete}
        self._print_event("published", digest=published.digest, **facts)

    def report_withdrawn(self, digest: str) -> None:
        self._print_event("withdrawn", digest=digest)

    def _print_event(self, event: str, **facts: object) -> None:
        self._output.print(json.dumps({"event": event, **facts}))
