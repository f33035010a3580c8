"""A pass forward and backward through blocks with ALiBi, beside one through rotated blocks.

    make bench BENCHMARKS=engine_benchmarks.families

Eight rows of 32 tokens go through two blocks of BLOOM and of Llama, random ones of the same sizes
in fp32, in turns. Times are the least of many turns: those of the idlest moment.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, PreTrainedConfig

from shoal.cli.benchmarking.figure import describe_machine
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.spans import Span

NUM_BLOCKS, NUM_HEADS, VOCABULARY = 2, 16, 256
NAMES = ("bloom", "llama")


def make_config(name: str, hidden_size: int) -> PreTrainedConfig:
    """Return the configuration of a model with about as many weights as the other."""
    if name == "bloom":
        return BloomConfig(
            vocab_size=VOCABULARY, hidden_size=hidden_size, n_layer=NUM_BLOCKS, n_head=NUM_HEADS
        )
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,  # two thirds of BLOOM's: a gate comes on top
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
    )


def load(config: PreTrainedConfig, num_threads: int) -> Engine:
    """Return an engine of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
        return load_engine(
            Checkpoint.open(Path(folder)),
            Span(0, NUM_BLOCKS),
            WeightFormat.FP32,
            kv_budget_bytes=2**26,
            num_threads=num_threads,
        )


def measure(engine: Engine, hidden: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a pass forward, and of one backward."""
    work = PassWork(engine.span, hidden)
    started_at = time.perf_counter()
    output = engine.passes.run_forward(work, lambda: None)
    there_at = time.perf_counter()
    engine.passes.run_backward(work, torch.ones_like(output), lambda: None)
    return there_at - started_at, time.perf_counter() - there_at


def main() -> None:
    """Measure in turns, and print the least times and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    size = options.hidden_size
    engines = {name: load(make_config(name, size), options.threads) for name in NAMES}
    hidden = 0.02 * torch.randn(options.rows, options.tokens, size)
    turns = [
        {name: measure(engine, hidden) for name, engine in engines.items()}
        for _ in range(options.turns)
    ]
    least = {name: [min(turn[name][way] for turn in turns) for way in (0, 1)] for name in engines}
    ratios = [bloom / llama for bloom, llama in zip(least["bloom"], least["llama"], strict=True)]
    print(
        json.dumps(
            {
                "machine": describe_machine(),
                "seconds": {name: [round(one, 4) for one in ways] for name, ways in least.items()},
                "ratio_forward": round(ratios[0], 2),
                "ratio_backward": round(ratios[1], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
