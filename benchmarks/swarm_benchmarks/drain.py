"""How long clients wait while a peer that serves them is asked to stop, against their normal steps.

Real processes, the bundled model in int8, two peers for each half of it. What clients write lies on
one clock; a step is one token, embedding and head included.
"""

import argparse
import gc
import threading
import time
from pathlib import Path
from statistics import median

import torch

from measuring.program import run_program
from shoal.cli.benchmarking.figure import describe_machine
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

MODEL = Path(__file__).resolve().parents[2] / "models" / "shoal-stories"
SPANS = [(0, 4), (0, 4), (4, 8), (4, 8)]
QUIET_SECONDS, DRAIN_SECONDS, AFTER_SECONDS = 6.0, 20.0, 2.0
MAX_TOKENS = 1800
THINKING_SECONDS = 0.02
"""Between two steps of a client, so that the processes of one machine do not stand in a queue."""


class Writer(threading.Thread):
    """One client's text, token by token, until it is told to stop."""

    def __init__(self, model: DistributedCausalLM, number: int) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []
        self.num_lost = 0
        self._model, self._number = model, number
        self._is_over = threading.Event()

    def run(self) -> None:
        """Write, and note when each step began and how long it took."""
        with self._model.inference_session(max_length=MAX_TOKENS) as session:
            self._write(torch.arange(5, 25 + self._number)[None])
            while not self._is_over.wait(THINKING_SECONDS) and len(self.times) < MAX_TOKENS - 100:
                started_at = time.monotonic()
                self._write(None)
                self.times.append((started_at, time.monotonic() - started_at))
            self.num_lost = len(session.failovers)

    def end(self) -> None:
        """Stop writing, and wait for that."""
        self._is_over.set()
        self.join()

    def _write(self, ids: torch.Tensor | None) -> None:
        self._model.generate(ids, max_new_tokens=1, min_new_tokens=1, do_sample=False)


def main() -> None:
    """Print the longest step of each client during the drain, and the median before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--delivery", choices=("chain", "star"), default="chain")
    options = parser.parse_args()
    print(describe_machine())
    gc.freeze()  # as our commands do; or a step may wait until all modules are looked through
    with LocalSwarm(
        MODEL, spans=SPANS, weights="int8", num_threads=1, drain_seconds=DRAIN_SECONDS
    ) as swarm:
        peers, delivery = swarm.initial_peers, options.delivery
        with AutoDistributedModelForCausalLM.from_pretrained(
            MODEL, initial_peers=peers, delivery=delivery
        ) as model:
            writers = [Writer(model, number) for number in range(options.clients)]
            for writer in writers:
                writer.start()
            time.sleep(QUIET_SECONDS)
            began_at = time.monotonic()
            swarm.peers[2].drain()
            gone_at = time.monotonic()
            time.sleep(AFTER_SECONDS)
            for writer in writers:
                writer.end()
    times = [step for writer in writers for step in writer.times]
    normal = median(seconds for at, seconds in times if at < began_at)
    longest = max(seconds for at, seconds in times if began_at <= at <= gone_at + 0.5)
    print(f"the peer was gone after {gone_at - began_at:.2f} s")
    print(f"a normal step            {1e3 * normal:7.1f} ms")
    print(
        f"longest during the drain {1e3 * longest:7.1f} ms, {longest / normal:.2f} x (target <= 3)"
    )
    print(f"sessions that lost a peer {sum(writer.num_lost for writer in writers)}")


if __name__ == "__main__":
    run_program(main)
