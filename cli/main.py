"""Reads the command line, runs the chosen subcommand, and prints errors in one sentence."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..protocol.errors import ShoalError, UnavailableError, UsageError
from ..protocol.versions import SOFTWARE
from .command_table import SUMMARIES, load_command
from .options.config_file import apply_config
from .options.shared_options import join_addresses
from .terminal.interrupts import INTERRUPTED, INTERRUPTED_FACTS, quitting_at_once
from .terminal.notices import add_log_argument, make_handler
from .terminal.terminal import Terminal, prepare_streams

WRONG_USAGE = 2
"""The exit code where an option, or a file that it names, is wrong; other failures end with 1."""

_WRONG_USAGES = {"monitor": 64}
"""Exit codes of commands for which the usual one means something else (64: sysexits.h)."""

_RUN_FOR_DAYS = ("serve", "monitor")
"""Commands whose logs programs may read."""


class _HelpFormatter(argparse.HelpFormatter):
    """Makes the column of the subcommands wide enough: argparse forgets that they are indented."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option, or all subcommands."""
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += self._indent_increment


class _Parser(argparse.ArgumentParser):
    """Prints errors of the command line on one line."""

    def error(self, message: str) -> NoReturn:
        is_word_of_options = self.prog.endswith("generate") and "-h/--help" in message  # -hello
        if message.endswith("PROMPT") or is_word_of_options:
            message += " (put a prompt that begins with - after `--`, or pass it on stdin with -)"
        code = _WRONG_USAGES.get(self.prog.rpartition(" ")[2], WRONG_USAGE)
        self.exit(code, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code. Prints no traceback unless SHOAL_DEBUG is set."""
    prepare_streams()
    try:
        with quitting_at_once():
            options = _parse(list(sys.argv[1:] if arguments is None else arguments))
            _set_up_logging(getattr(options, "log_format", "lines"))
        return _run(options)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the line that ^C stands on
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has closed it: `shoal generate … | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(options: argparse.Namespace) -> int:
    """Run a subcommand and print its error, if any, as one sentence.

    With --json the error, or Ctrl-C, is also an object on the last line of stdout, so that programs
    always find one there.
    """
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        if getattr(options, "json", False):
            with contextlib.suppress(UnavailableError, BrokenPipeError):
                Terminal(sys.stdout).print(INTERRUPTED_FACTS)
        raise
    except BrokenPipeError:
        raise
    except (OSError, ShoalError) as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        from .options.join_options import fill_in  # no time of `--help`

        said = fill_in(_in_one_line(error), options)
        # If stderr takes no more, the sentence is lost.
        with contextlib.suppress(UnavailableError, BrokenPipeError):
            if getattr(options, "log_format", "lines") == "json":
                record = logging.LogRecord("shoal.cli", logging.ERROR, "", 0, said, None, None)
                make_handler("json").handle(record)
            else:
                notices = Terminal(sys.stderr)
                for line in notices.wrap(f"shoal {options.command}: {said}"):
                    notices.print(line)
        if getattr(options, "json", False):
            facts = {"error": said, "kind": type(error).__name__}
            with contextlib.suppress(UnavailableError):  # or stdout
                Terminal(sys.stdout).print_json(facts)
        wrong_usage = _WRONG_USAGES.get(options.command, WRONG_USAGE)
        return wrong_usage if isinstance(error, UsageError) else 1


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Read the command line; imports the module of the chosen subcommand."""
    parser = _Parser(
        prog="shoal",
        description="Run and fine-tune large language models on volunteers' machines.",
        epilog="Start with `shoal demo`.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=SOFTWARE)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, summary in SUMMARIES.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command = load_command(name)
            command.add_arguments(subparser)
            if name in _RUN_FOR_DAYS:
                add_log_argument(subparser)
            try:
                apply_config(subparser, given)
            except UsageError as error:
                subparser.error(str(error))
            subparser.set_defaults(run=command.run, words=tuple(given))
    options, unexpected = parser.parse_known_args(join_addresses(given))
    if unexpected:
        advice = "; put the prompt in quotes" if _is_unquoted_prompt(options, unexpected) else ""
        subparsers.choices[options.command].error(f"unexpected argument {unexpected[0]!r}{advice}")
    return options


def _is_unquoted_prompt(options: argparse.Namespace, unexpected: Sequence[str]) -> bool:
    return options.command == "generate" and not unexpected[0].startswith("-")


def _set_up_logging(log_format: str) -> None:
    # The Hub's library logs every failed attempt to reach it; our error says how they ended.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # we say what is wrong with a model
    # grpc logs each start of a process that it is not prepared for; ours load another program.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are told in a sentence of ours
    wanted = os.environ.get("SHOAL_LOG", "").upper()
    level = logging.getLevelNamesMapping().get(wanted)
    if level is not None and log_format == "lines":
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    else:
        handlers = [make_handler(log_format)]
        logging.basicConfig(level=level or logging.WARNING, handlers=handlers)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
