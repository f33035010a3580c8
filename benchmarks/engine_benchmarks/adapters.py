"""What adapters cost in one engine with int8 weights, without a network.

    make bench BENCHMARKS=engine_benchmarks.adapters

Passes: eight rows of 256 tokens go forward and backward through some blocks of the benchmark model,
with eight different adapters, or the same one in all rows, in turns. Steps: milliseconds per block
for a token of each of some sessions, and for a prompt, where each session has its own adapter.
"""

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

import safetensors.torch
import torch
from transformers import AutoConfig

from measuring.benchmark_model import make_benchmark_model
from shoal.cli.benchmarking.figure import describe_machine
from shoal.client.training.lora import LoraAdapter
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.engine.steps import StepWork
from shoal.protocol.spans import Span

ROWS, TOKENS, RANK = 8, 256, 8
NUM_TRIALS = 3

RANKS = (0, 8, 64, 256)
"""Of the adapters of sessions; with 0 they have none."""

SESSIONS = (1, 4, 16)
PROMPT_TOKENS = 64
NUM_STEPS = 12


class Described:
    """A model as far as an adapter has to know it."""

    def __init__(self, directory: str) -> None:
        self.config = AutoConfig.from_pretrained(directory)


def make_adapters(
    engine: Engine, described: Described, rank: int = RANK, count: int = ROWS
) -> list[Adapter]:
    """Return different adapters of all linears."""
    adapters: list[Adapter] = []
    for seed in range(count):
        trained = LoraAdapter.create(described, rank=rank, seed=seed)
        tensors = safetensors.torch.save(
            {
                name: matrix.contiguous()
                for name, matrix in trained.copy_matrices().items()
                if int(name.split(".layers.")[1].split(".")[0]) in engine.span
            }
        )
        config = trained.lora_config.to_json()
        adapters.append(read_adapter(config, tensors, engine.spec, engine.span))
    return adapters


def measure(engine: Engine, adapters: Sequence[Adapter | None]) -> float:
    """Return how many tokens per second go forward and backward."""
    hidden = 0.02 * torch.randn(ROWS, TOKENS, engine.spec.hidden_size)
    work = PassWork(engine.span, hidden, adapters=tuple(adapters))
    started_at = time.perf_counter()
    output = engine.passes.run_forward(work, lambda: None)
    engine.passes.run_backward(work, torch.randn_like(output), lambda: None)
    return ROWS * TOKENS / (time.perf_counter() - started_at)


def measure_steps(
    engine: Engine, adapters: Sequence[Adapter | None], num_tokens: int
) -> list[float]:
    """Return the milliseconds that steps of these sessions take per block."""
    caches = [engine.pool.open(1, 4096, engine.span) for _ in adapters]
    seconds: list[float] = []
    for number in range(NUM_STEPS):
        works = [
            StepWork(
                cache,
                cache.length,
                0.02 * torch.randn(1, num_tokens, engine.spec.hidden_size),
                decoded=num_tokens == 1,
                adapter=adapter,
            )
            for cache, adapter in zip(caches, adapters, strict=True)
        ]
        started_at = time.thread_time()
        engine.execute(works)
        if number:  # the first one warms up
            seconds.append(time.thread_time() - started_at)
    for cache in caches:
        cache.close()
    return [1000 * one / len(engine.span) for one in seconds]


def measure_sessions(engine: Engine, described: Described) -> dict[str, dict[str, float]]:
    """Return milliseconds per block for each rank."""
    found: dict[str, dict[str, float]] = {}
    for rank in RANKS:
        adapters: list[Adapter | None] = [None] * max(SESSIONS)
        if rank:
            adapters = [*make_adapters(engine, described, rank, max(SESSIONS))]
        cells = {f"{n} sessions": (adapters[:n], 1) for n in SESSIONS}
        cells[f"a prompt of {PROMPT_TOKENS}"] = adapters[:1], PROMPT_TOKENS
        found[f"rank {rank}"] = {
            name: round(median(measure_steps(engine, *cell)), 3) for name, cell in cells.items()
        }
    return found


def main() -> None:
    """Measure in turns, and print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = make_benchmark_model()
    engine = load_engine(
        Checkpoint.open(model.directory),
        Span(0, options.blocks),
        WeightFormat.INT8,
        kv_budget_bytes=2**26,
        num_threads=options.threads,
    )
    described = Described(str(model.directory))
    steps = measure_sessions(engine, described)
    different = make_adapters(engine, described)
    kinds = {"none": [], "one": different[:1] * ROWS, "eight": different}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    measure(engine, different)  # warm
    for _ in range(NUM_TRIALS):
        for kind, adapters in kinds.items():
            rates[kind].append(measure(engine, adapters))
    found = {kind: round(median(values), 1) for kind, values in rates.items()}
    ratio = round(found["eight"] / found["one"], 3)
    print(
        json.dumps(
            {
                "machine": describe_machine(),
                "tokens_per_second": found,
                "ratio": ratio,
                "step_milliseconds_per_block": steps,
            }
        )
    )


if __name__ == "__main__":
    main()
