"""What the benchmarks share: the benchmark model, the machine's name, and how results are shown."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
STORIES = ROOT / "models" / "shoal-stories"
BENCHMARK_MODEL = ROOT / ".benchmarks" / "llama-180m"


@dataclass(frozen=True)
class Figure:
    """One measured number; `target` says what it should be, in words."""

    name: str
    value: float
    unit: str
    target: str = ""
    is_met: bool | None = None


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the one option that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def report(title: str, figures: list[Figure], as_json: bool) -> None:
    """Print the figures as a table, or as JSON."""
    if as_json:
        results = [asdict(figure) for figure in figures]
        print(json.dumps({"title": title, "machine": describe_machine(), "figures": results}))
        return
    print(f"{title}\n{describe_machine()}\n")
    for figure in figures:
        mark = {None: " ", True: "+", False: "-"}[figure.is_met]
        target = f"  (target {figure.target})" if figure.target else ""
        print(f"{mark} {figure.name:<44}{figure.value:>10.4g} {figure.unit}{target}")
    print()


def describe_machine() -> str:
    """Return processor, cores, Python and torch in one line."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return (
        f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def measure_seconds(function: Callable[[], object], num_times: int) -> float:
    """Return the median seconds of several calls; the first call warms up and is not counted."""
    function()
    seconds = []
    for _ in range(num_times):
        started_at = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)


def make_benchmark_model() -> Path:
    """Write the model that all published figures use, once: a random Llama in bf16, hidden 1024,
    intermediate 2816, 16 blocks, 16 heads, 4 KV heads, vocabulary 32000."""
    if not (BENCHMARK_MODEL / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32000,
            max_position_embeddings=8192,
        )
        model: Any = LlamaForCausalLM(config)  # transformers' own types do not fit its calls
        model.to(torch.bfloat16).save_pretrained(BENCHMARK_MODEL)
    return BENCHMARK_MODEL
