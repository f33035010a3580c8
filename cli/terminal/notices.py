"""What is logged, as sentences for people or as JSON for programs."""

import argparse
import logging
import sys
import time
import traceback

from .terminal import Terminal


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the format of what is logged."""
    parser.add_argument(
        "--log-format", choices=("lines", "json"), default="lines",
        help="how warnings and errors are written to stderr (default: %(default)s)",
    )  # fmt: skip


def make_handler(log_format: str) -> logging.Handler:
    """Return what writes log records to stderr."""
    return JsonHandler() if log_format == "json" else NoticeHandler()


class JsonHandler(logging.Handler):
    """Writes each record on stderr as one line of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with the traceback of its exception if it has one."""
        facts: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        Terminal(sys.stderr).print_json(facts)


class NoticeHandler(logging.Handler):
    """Prints what is logged on stderr: the time and a sentence, like the events of a peer.

    With SHOAL_LOG, lines of logging with levels and modules take its place.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, and the traceback of its exception if it has one."""
        terminal = Terminal(sys.stderr)
        sentence = " ".join(record.getMessage().split()).rstrip(".")
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        for line in terminal.wrap(f"{at} {sentence[:1].upper()}{sentence[1:]}."):
            terminal.print(line)
        if record.exc_info:
            terminal.write("".join(traceback.format_exception(*record.exc_info)))
