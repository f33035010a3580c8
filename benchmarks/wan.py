"""Peers far apart: real processes whose connections are delayed and limited, on this machine.

Decoding in a star and in a chain, prompts sent whole and in pieces, 16 and 8 bits on the wire. The
lines are `cli/benchmarks/slow_lines.py`. Nothing else should run meanwhile.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from transformers.utils import logging

from shoal.cli.benchmarks.benchmark_model import make_wide_model, open_bundled_model
from shoal.cli.benchmarks.distant_swarm import DistantSwarm, start_distant_swarm
from shoal.cli.benchmarks.figures import Figure, describe_machine
from shoal.cli.benchmarks.report import BenchReport, PartReport
from shoal.cli.benchmarks.slow_lines import LineConfig
from shoal.cli.benchmarks.wan import WanEffort, measure_decoding, measure_prompts
from shoal.protocol.errors import ShoalError

Say = Callable[[str], None]
Measure = Callable[[DistantSwarm, WanEffort, Say], Coroutine[Any, Any, list[Figure]]]

PARTS: dict[str, tuple[str, Measure]] = {
    "decode": ("Steps of one token, hidden states in and out", measure_decoding),
    "prompt": ("A prompt over three hops, in a chain", measure_prompts),
}
QUICK = WanEffort(num_steps=3, num_prompts=1, prompt_tokens=256)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--rtt", type=float, default=40.0, metavar="MS", help="round trip of a line"
    )
    parser.add_argument("--mbits", type=float, default=100.0, help="of a line, each way")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="MS", help="at most, each way")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser.parse_args()


def main() -> int:
    """Measure and report."""
    options = read_options()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    effort = QUICK if options.quick else WanEffort()
    line = LineConfig(
        options.rtt / 2000, options.mbits * 1e6 / 8, options.jitter / 1000, options.seed
    )
    model = open_bundled_model() if options.quick else make_wide_model(max(effort.hops))
    with start_distant_swarm(model, max(effort.hops), line) as swarm:
        parts = [measure(name, swarm, effort) for name in options.parts or PARTS]
    report = BenchReport(describe_machine(), options.quick, tuple(parts))
    if options.json:
        print(json.dumps(report.to_json()))
    else:
        print(f"{report.machine}; lines of {options.rtt:g} ms and {options.mbits:g} Mbit/s\n")
        print(*(part.to_text() for part in parts), sep="\n", end="\n")
        print(report.to_verdict())
    return 0


def measure(name: str, swarm: DistantSwarm, effort: WanEffort) -> PartReport:
    title, measure_part = PARTS[name]
    started_at = time.monotonic()
    figures = asyncio.run(measure_part(swarm, effort, say))
    report = PartReport(name, title, time.monotonic() - started_at, tuple(figures))
    return report.without_targets() if effort is QUICK else report


def say(status: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{status}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShoalError as error:
        sys.exit(str(error))
