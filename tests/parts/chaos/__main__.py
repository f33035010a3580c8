"""`make chaos`: a swarm of real processes under kills, pauses, cut links, drains and joins.

Clients write all the time, and every token has to be the one of an undisturbed run. What is done
follows from the seed; the same seed does the same again.
"""

from __future__ import annotations

import argparse
import sys
import time

from chaos.report import describe_failure, describe_outcome
from chaos.run import PLANS, Setting, run_chaos

from shoal.cli.options.bundled_model import count_blocks, find_model
from shoal.cli.options.layout import plan_spans
from shoal.cli.terminal.interrupts import INTERRUPTED, stop_on_sigterm
from shoal.protocol.errors import ShoalError


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (default: 60)")
    parser.add_argument("--seed", type=int, help="what is done (default: another one each time)")
    parser.add_argument("--peers", type=int, default=7, help="peers at the beginning (default: 7)")
    parser.add_argument("--replicas", type=int, default=3, help="peers of a block (default: 3)")
    parser.add_argument("--clients", type=int, default=4, help="clients (default: 4)")
    parser.add_argument("--weights", choices=("fp32", "int8"), default="fp32")
    kind_help = "all kinds of trouble (default), or half of a block's peers killed every minute"
    parser.add_argument("--kind", choices=tuple(PLANS), default="mixed", help=kind_help)
    parser.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    try:
        spans = plan_spans(count_blocks(find_model()), options.peers, options.replicas)
        setting = Setting(
            seed, options.seconds, spans, options.clients, options.weights, options.kind
        )
        if options.plan:
            print(*setting.plan(), sep="\n")
            return 0
        with stop_on_sigterm():
            outcome = run_chaos(setting, lambda line: print(line, flush=True))
    except ShoalError as error:
        print(f"make chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    if outcome.failures:
        print(f"\n{describe_failure(outcome)}", file=sys.stderr, flush=True)
    print(f"\n{describe_outcome(outcome)}")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
