"""`shoal limits`: show how much a peer of this machine gives, and change it while it runs."""

import argparse
import sys

from ..options.operating_options import parse_hours
from ..options.quantities import parse_bytes, parse_count, parse_memory
from ..terminal.terminal import Terminal
from .local_peers import add_name_arguments, call, show_limits

_LIMITS = ("sessions", "kv_memory", "training_memory", "adapter_memory", "upload", "download")
_ALWAYS = "always"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal limits`."""
    parser.description = (
        "Show how much a peer gives, or change it. Where more is in use than a new limit allows, "
        "nothing ends, and nothing new is admitted until it fits. The next start of the peer goes "
        "by its own options."
    )
    add_name_arguments(parser)
    parser.add_argument(
        "--sessions", type=parse_count, metavar="N", help="most sessions at the same time"
    )
    for name, what in (
        ("--kv-memory", "KV caches of sessions"),
        ("--training-memory", "fine-tuning clients; 0 disables fine-tuning"),
        ("--adapter-memory", "LoRA adapters uploaded by clients; 0 disables them"),
    ):
        parser.add_argument(name, type=parse_memory, metavar="BYTES", help=f"memory for {what}")
    for name, what in (("--upload", "sends"), ("--download", "receives")):
        parser.add_argument(
            name, type=parse_bytes, metavar="BYTES",
            help=f"drain the peer while it {what} more bytes a second, on average of a minute; 0: "
            "no limit",
        )  # fmt: skip
    parser.add_argument(
        "--hours", type=_parse_hours, action="append", metavar="HH:MM-HH:MM",
        help=f"serve at these hours of the day only; may be given more than once, `{_ALWAYS}` for "
        "all hours",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Change the limits that are given, if any, and print all; return 0."""
    changes = {name: value for name in _LIMITS if (value := getattr(options, name)) is not None}
    if options.hours is not None:
        changes["hours"] = ",".join(filter(None, options.hours))
    if changes:
        doing = f"Changing limits of {options.name}"
        answer = call(options, "SetLimits", doing, {"limits": changes})
        peer, notes = answer["peer"], answer["notes"]
    else:
        peer, notes = call(options, "Describe", f"Asking {options.name}"), []
    terminal = Terminal(sys.stdout)
    if options.json:
        terminal.print_json({"limits": peer["limits"], "used": peer["used"], "notes": notes})
        return 0
    show_limits(peer, terminal)
    for note in notes:
        for line in terminal.wrap(note):
            terminal.print(terminal.paint(line, "yellow"))
    return 0


def _parse_hours(text: str) -> str:
    return "" if text == _ALWAYS else str(parse_hours(text))
