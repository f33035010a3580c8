"""Warnings that are logged, as sentences for people."""

import logging
import sys
import time
import traceback

from .terminal import Terminal


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
