"""What is logged, as sentences for people or as JSON for programs."""

import argparse
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Iterator

from ...protocol.errors import UnavailableError
from .terminal import Terminal

_QUIET_SECONDS = 600.0
"""After so long without a warning it has ended; most that repeat do so within a minute."""

_MAX_WARNINGS = 100
"""That are remembered; where there are more, the one that came longest ago has ended."""


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the format of what is logged."""
    parser.add_argument(
        "--log-format", choices=("lines", "json"), default="lines",
        help="how warnings and errors are written to stderr (default: %(default)s)",
    )  # fmt: skip


def make_handler(log_format: str) -> logging.Handler:
    """Return what writes log records to stderr, and repeated warnings once."""
    return RepeatMerger(JsonHandler() if log_format == "json" else NoticeHandler())


class RepeatMerger(logging.Handler):
    """Passes on each warning or error once, and how often it was repeated when it has ended.

    Time is that of the records, and nothing wakes it: an end is told before the next record, or
    when the process ends.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target
        self._warnings: dict[tuple[str, str, str], tuple[int, logging.LogRecord]] = {}
        """How often each was repeated, and its newest record; by the time of that."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, unless it is a warning that was passed on already."""
        for ended in self._forget_ended(record.created):
            self._target.handle(ended)
        if record.levelno < logging.WARNING:
            self._target.handle(record)
            return
        error = repr(record.exc_info[1]) if record.exc_info else ""
        warning = record.name, record.getMessage(), error
        if warning not in self._warnings:
            self._target.handle(record)
        num_repeats, _ = self._warnings.pop(warning, (-1, None))
        self._warnings[warning] = num_repeats + 1, record

    def _forget_ended(
        self, now: float, quiet_seconds: float = _QUIET_SECONDS
    ) -> Iterator[logging.LogRecord]:
        """Forget the warnings that have ended; yield what there is to say of those repeated."""
        for warning, (num_repeats, last) in list(self._warnings.items()):
            is_over = now - last.created >= quiet_seconds
            if not is_over and len(self._warnings) <= _MAX_WARNINGS:
                break
            del self._warnings[warning]
            if num_repeats:
                at = time.strftime("%H:%M:%S", time.localtime(last.created))
                times = "once" if num_repeats == 1 else f"{num_repeats} times"
                text = f"{last.getMessage().rstrip('.')} (repeated {times} until {at})"
                yield logging.makeLogRecord(
                    {**vars(last), "msg": text, "args": (), "exc_info": None, "created": now}
                )

    def close(self) -> None:
        """Tell what was repeated; called when the process ends."""
        with contextlib.suppress(UnavailableError, BrokenPipeError):
            for ended in self._forget_ended(time.time(), quiet_seconds=float("-inf")):
                self._target.handle(ended)
        super().close()


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
