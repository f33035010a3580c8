"""`shoal bench`: measure swarms on this machine, beside plain transformers in the same run, or one
that runs already.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol.errors import UsageError
from .benchmarks.effort import FULL, QUICK
from .benchmarks.figures import describe_machine
from .benchmarks.parts import JOINED, PARTS
from .benchmarks.plot import draw_curve
from .benchmarks.report import BenchReport, Findings, PartReport, measure_part
from .terminal.bundled_model import find_model
from .terminal.heavy_imports import importing_much
from .terminal.interrupts import end_in_good_order, quitting_at_once
from .terminal.joining import add_join_arguments, read_joining
from .terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from .benchmarks.setting import Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    titles = [f"  {name:<14}{title}" for name, title in PARTS.items()]
    parser.epilog = "\n".join(["parts:", *titles])
    parser.add_argument(
        "parts", metavar="PART", nargs="*", type=_parse_part,
        help="what to measure, see below (default: everything)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="only see that everything runs, on the bundled model; the numbers mean nothing",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER",
        help="draw the part `sessions` into FOLDER, as sessions.svg and sessions.png",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    joined = parser.add_argument_group("to measure a swarm that runs already")
    joined.add_argument(
        "--model", metavar="MODEL", help="what it serves: a model directory, or an id on the Hub"
    )
    add_join_arguments(joined, "address of any of its peers, instead of a code")


def run(options: argparse.Namespace) -> int:
    """Measure and report; return 1 when a part could not be measured, else 0."""
    names = [name for name in PARTS if name in (options.parts or PARTS)]
    if options.plot is not None and "sessions" not in names:
        raise UsageError("--plot draws the part `sessions`; measure that too")
    is_joined = bool(options.join or options.initial_peers or options.model)
    if is_joined and (options.parts or options.plot is not None):
        raise UsageError("parts and --plot are for swarms that bench starts; leave them out")
    bench = _Bench(options.quick, None if options.json else Terminal(sys.stdout))
    with end_in_good_order():
        report = bench.measure_joined(options) if is_joined else bench.measure(names)
        if options.plot is not None and report.curve is not None:
            files = draw_curve(report.curve, report.machine, options.plot)
            print(f"Drew {' and '.join(map(str, files))}.", file=sys.stderr)
    if options.json:
        print(json.dumps(report.to_json()), flush=True)
    else:
        print(report.to_verdict(), flush=True)
    return 1 if report.has_errors else 0


def _parse_part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(
            f"there is no part {text!r} to measure; choose from {', '.join(PARTS)}"
        )
    return text


class _Bench:
    """One run: shows each part as soon as it is measured, unless there is no terminal for it."""

    def __init__(self, is_quick: bool, terminal: Terminal | None) -> None:
        self._is_quick = is_quick
        self._terminal = terminal
        self._status = "loading"

    def measure(self, names: list[str]) -> BenchReport:
        """Measure the parts, one after the other."""
        machine = describe_machine()
        self._show(f"{machine}\n")
        with Progress(Terminal(sys.stderr), lambda: self._status):
            with quitting_at_once(), importing_much():
                setting_module = importlib.import_module(".benchmarks.setting", __package__)
            effort = QUICK if self._is_quick else FULL
            setting = setting_module.Setting(effort, self._is_quick, self._say)
        with setting:
            parts = [self._measure_part(setting, name) for name in names]
        return BenchReport(machine, self._is_quick, tuple(parts))

    def measure_joined(self, options: argparse.Namespace) -> BenchReport:
        """Measure a swarm that runs already."""
        if options.model is None:
            raise UsageError("say what the swarm serves: --model MODEL")
        model, joining = find_model(options.model), read_joining(options)
        machine = describe_machine()
        self._show(f"{machine}\n")
        effort = QUICK if self._is_quick else FULL
        part = self._report_part(
            JOINED, lambda module: module.measure(model, joining, effort, self._say)
        )
        return BenchReport(machine, self._is_quick, (part,))

    def _measure_part(self, setting: "Setting", name: str) -> PartReport:
        return self._report_part(name, lambda module: module.measure(setting))

    def _report_part(self, name: str, measure: Callable[[Any], Findings]) -> PartReport:
        """Let the module of a part measure, and show what it found."""
        self._status = name
        with Progress(Terminal(sys.stderr), lambda: f"{name}: {self._status}"):
            module = importlib.import_module(f".benchmarks.{name}", __package__)
            report = measure_part(name, lambda: measure(module))
        if self._is_quick:
            report = report.without_targets()
        self._show(report.to_text())
        return report

    def _say(self, status: str) -> None:
        self._status = status

    def _show(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.print(text)
