"""A benchmark as a program: its options, its exit code, and its end by a signal."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from measuring.report import BenchRun
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.cli.terminal.interrupts import INTERRUPTED, stop_on_sigterm
from shoal.protocol.errors import ShoalError


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark, and end with what it returns.

    What it has started ends with it, after SIGTERM too, and nothing prints a traceback then. An
    error of ours is one line.
    """
    try:
        with stop_on_sigterm():
            code = main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (OSError, ShoalError) as error:
        sys.exit(f"make bench: {error}")
    sys.exit(code)


def measure_one(
    name: str,
    title: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Callable[[str], None]], Sequence[Figure]],
) -> int:
    """Measure one thing by the options of the command line, and print its figures; return 1 when
    it could not be measured, else 0. The title may name options in braces.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    bench = BenchRun(describe_machine(), is_quick=False, as_json=options.json)
    bench.measure(name, title.format_map(vars(options)), lambda: measure(options, bench.say))
    return bench.finish()
