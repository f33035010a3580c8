"""`shoal bench`: measure a running swarm from this machine."""

import argparse
from collections.abc import Sequence

from ...protocol.errors import UsageError
from ..figures.bench_report import BenchRun, Figure, describe_machine
from ..options.bundled_model import find_model
from ..options.join_options import add_join_arguments, read_joining
from ..remote_models.opening import open_model
from ..terminal.interrupts import end_in_good_order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal bench`."""
    parser.epilog = "To benchmark swarms on one machine, run `make bench` in a checkout of shoal."
    parser.add_argument(
        "--model", metavar="MODEL",
        help="model that the swarm serves: directory or Hub id",
    )  # fmt: skip
    add_join_arguments(parser, "address of any of its peers, instead of a code")
    parser.add_argument(
        "--quick", action="store_true",
        help="run each measurement briefly, to test that it works; the figures are meaningless",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Measure and report; return 1 when the swarm could not be measured, else 0."""
    if options.model is None:
        raise UsageError("say what the swarm serves: --model MODEL")
    model, joining = find_model(options.model), read_joining(options)
    bench = BenchRun(describe_machine(), options.quick, options.json)

    def measure() -> Sequence[Figure]:
        # It imports torch for seconds; usage errors above must not wait for it.
        from ..figures.swarm_speed import measure_swarm

        bench.say("joining")
        with open_model(model, joining.initial_peers, join=joining.join) as remote:
            return measure_swarm(remote, options.quick, bench.say)

    with end_in_good_order():
        bench.measure("joined", "A swarm that runs already, from here", measure)
    return bench.finish()
