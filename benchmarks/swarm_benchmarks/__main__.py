"""`make bench`: measure swarms on this machine, beside plain transformers in the same run."""

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine_benchmarks import accuracy
from measuring.program import run_program
from measuring.report import BenchRun
from shoal.cli.benchmarking.figure import Figure, describe_machine
from swarm_benchmarks import (
    attacks,
    failover,
    finetune,
    flood,
    hop,
    idle,
    memory,
    metrics,
    p2pd,
    start,
)
from swarm_benchmarks.curve import draw_curve
from swarm_benchmarks.decoding import measure_context, measure_sessions, measure_single
from swarm_benchmarks.prompts import measure_newcomer, measure_prompts
from swarm_benchmarks.setting import Setting


class Part(NamedTuple):
    """Something that can be measured."""

    title: str
    measure: Callable[[Setting], list[Figure]]


def _measure_accuracy(setting: Setting) -> list[Figure]:
    return accuracy.measure(setting.tiny_model, setting.model, setting.say)


PARTS = {
    "single": Part("One session: 2 peers, int8, 1 thread each", measure_single),
    "sessions": Part("Many sessions at once, all clients in one process", measure_sessions),
    "prompts": Part("Prompts", measure_prompts),
    "newcomer": Part("First token while somebody else's long prompt is computed", measure_newcomer),
    "context": Part("Decoding behind a long text", measure_context),
    "hop": Part("What a hop costs beside computing: tiny model, one peer", hop.measure),
    "memory": Part("Memory of a session, of all peers together", memory.measure),
    "flood": Part("A client beside another one that floods the peers", flood.measure),
    "adapters": Part(
        "The same where each session of the flood has the largest adapter", flood.measure_adapters
    ),
    "attacks": Part("A client beside strangers who attack the peer", attacks.measure),
    "p2pd": Part("A client beside a stranger who ends a peer's p2pd again and again", p2pd.measure),
    "finetune": Part(
        "Gradients through frozen blocks, and steps beside a client that trains", finetune.measure
    ),
    "failover": Part("A lost peer", failover.measure),
    "start": Part("Starting", start.measure),
    "idle": Part("A peer that nobody uses", idle.measure),
    "metrics": Part("Steps with --metrics and without, in turn", metrics.measure),
    "scrape": Part("A scrape of a peer's metrics", metrics.measure_scrape),
    "accuracy": Part("int8 against fp32", _measure_accuracy),
}
"""By name, in the order in which they are measured."""


def read_options() -> argparse.Namespace:
    """Read the command line."""
    titles = [f"  {name:<14}{part.title}" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        epilog="\n".join(["parts:", *titles]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    options = parser.parse_args()
    options.parts = [name for name in PARTS if name in (options.parts or PARTS)]
    if options.plot is not None and "sessions" not in options.parts:
        parser.error("--plot draws the part `sessions`; measure that too")
    return options


def _parse_part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(
            f"there is no part {text!r} to measure; choose from {', '.join(PARTS)}"
        )
    return text


def main() -> int:
    """Measure and report; return 1 when a part could not be measured, else 0."""
    options = read_options()
    gc.freeze()  # as our commands do; or a step may wait until all modules are looked through
    machine = describe_machine()
    bench = BenchRun(machine, options.quick, options.json)
    with Setting(options.quick, bench.say) as setting:
        for name in options.parts:
            title, measure = PARTS[name]
            bench.measure(name, title, lambda measure=measure: measure(setting))
        if options.plot is not None and setting.curve is not None:
            files = draw_curve(setting.curve, machine, options.plot)
            print(f"Drew {' and '.join(map(str, files))}.", file=sys.stderr)
    return bench.finish()


if __name__ == "__main__":
    run_program(main)
