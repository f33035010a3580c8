"""Passes whose rows have adapters: eight different ones in a batch beside the same one in all rows.

    make bench BENCHMARKS=engine_benchmarks.adapters

Eight rows of 256 tokens go forward and backward through some blocks of the benchmark model in
one engine with int8 weights, without a network, in turns.
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
from shoal.protocol.spans import Span

ROWS, TOKENS, RANK = 8, 256, 8
NUM_TRIALS = 3


class Described:
    """A model as far as an adapter has to know it."""

    def __init__(self, directory: str) -> None:
        self.config = AutoConfig.from_pretrained(directory)


def make_adapters(engine: Engine, described: Described) -> list[Adapter]:
    """Return an adapter of all linears for each row."""
    adapters: list[Adapter] = []
    for seed in range(ROWS):
        trained = LoraAdapter.create(described, rank=RANK, seed=seed)
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
        kv_budget_bytes=2**24,
        num_threads=options.threads,
    )
    different = make_adapters(engine, Described(str(model.directory)))
    kinds = {"none": [], "one": different[:1] * ROWS, "eight": different}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    measure(engine, different)  # warm
    for _ in range(NUM_TRIALS):
        for kind, adapters in kinds.items():
            rates[kind].append(measure(engine, adapters))
    found = {kind: round(median(values), 1) for kind, values in rates.items()}
    ratio = round(found["eight"] / found["one"], 3)
    print(json.dumps({"machine": describe_machine(), "tokens_per_second": found, "ratio": ratio}))


if __name__ == "__main__":
    main()
