"""What int8 weights and caches cost on the bundled model: perplexity, greedy words, and memory.

The engines run in this process, without a network; `--weights` of a peer and `--kv` of a client
change nothing else.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from measuring.benchmark_model import BenchmarkModel
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import make_text_settings
from shoal.client.model.local_layers import load_config, load_local_layers
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import ModelSpec
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

_WINDOW_TOKENS = 512
_PROMPTS = ("Once upon a time", "One morning", "There was a", "The old", "Every day")
_NUM_GREEDY_TOKENS = 100
"""Greedy words are compared under the same context: the reference's own words."""


class _LocalModel:
    """Embedding, all blocks in one engine, norm and head: what client and peers do together."""

    def __init__(
        self, directory: Path, weights: WeightFormat, kv_format: KVFormat = KVFormat.FLOAT
    ) -> None:
        checkpoint = Checkpoint.open(directory)
        config = load_config(checkpoint)
        self.layers = load_local_layers(checkpoint, torch.float32)
        self.kv_format = kv_format
        self.span = Span(0, config.num_hidden_layers)
        self.engine = load_engine(checkpoint, self.span, weights, kv_budget_bytes=2**28)

    def compute_logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of whole sequences."""
        num_rows, num_tokens = tokens_BT.shape
        cache = self.engine.pool.open(num_rows, num_tokens, self.span, None, self.kv_format)
        try:
            work = StepWork(cache, 0, self.layers.embedding(tokens_BT))
            (hidden_BTH,) = self.engine.execute([work])
            if isinstance(hidden_BTH, Exception):
                raise hidden_BTH
            return self.layers.head(self.layers.norm(hidden_BTH))
        finally:
            cache.close()


def _compute_perplexity(model: _LocalModel, tokens: torch.Tensor) -> float:
    """Return the perplexity of a text, cut into windows."""
    losses, num_tokens = 0.0, 0
    for window in tokens.split(_WINDOW_TOKENS):
        if len(window) < 2:
            continue
        logits_TV = model.compute_logits(window[None])[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits_TV, window[1:], reduction="sum").item()
        num_tokens += len(window) - 1
    return math.exp(losses / num_tokens)


def _compare_greedy(ours: _LocalModel, texts: list[torch.Tensor]) -> float:
    """Return the fraction of greedy tokens that are the same, each under the reference's text."""
    num_same, num_tokens = 0, 0
    for tokens_1T in texts:
        predicted = ours.compute_logits(tokens_1T)[0].argmax(-1)
        start = tokens_1T.shape[1] - _NUM_GREEDY_TOKENS
        num_same += int((predicted[start - 1 : -1] == tokens_1T[0, start:]).sum())
        num_tokens += _NUM_GREEDY_TOKENS
    return num_same / num_tokens


def _measure_loading_bytes(directory: Path, weights: str) -> tuple[int, int]:
    """Return (peak, final) bytes that loading all blocks adds, in a fresh process.

    The peak is the kernel's high-water mark, less what was there after loading one block, which
    warms up and is dropped again.
    """
    program = (
        "import sys\n"
        "from shoal.models.checkpoints.checkpoint import Checkpoint\n"
        "from shoal.kernels.linear.quantize import WeightFormat\n"
        "from shoal.peer.engine.loading.engine_loader import load_engine\n"
        "from shoal.protocol.spans import Span\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "span = Span(0, checkpoint.config['num_hidden_layers'])\n"
        "load_engine(checkpoint, Span(0, 1), WeightFormat(sys.argv[2]), kv_budget_bytes=0)\n"
        "def read(name):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return 1024 * int(next(l.split()[1] for l in lines if l.startswith(name)))\n"
        "before = read('VmRSS')\n"
        "engine = load_engine(checkpoint, span, WeightFormat(sys.argv[2]), kv_budget_bytes=0)\n"
        "print(read('VmHWM') - before, engine.num_weight_bytes)\n"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", program, str(directory), weights],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    peak, final = output.split()
    return int(peak), int(final)


def _count_blocks_over(peak_bytes: int, final_bytes: int, block_bytes: int) -> float:
    """Return how many blocks were in memory beside the final ones.

    Small blocks fit into what the first one has left behind: then there is no peak to be seen.

    >>> _count_blocks_over(50, 30, 40), _count_blocks_over(20, 30, 40)
    (0.5, 0.0)
    """
    return max(0, peak_bytes - final_bytes) / block_bytes


def measure(
    tiny_model: BenchmarkModel, model: BenchmarkModel, say: Callable[[str], None]
) -> list[Figure]:
    """Compare int8 with fp32 on the bundled model, and weigh the model that is measured."""
    directory = tiny_model.directory
    say("texts of the reference")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = [_generate(reference, tokenizer(prompt).input_ids) for prompt in _PROMPTS]
    say("perplexity")
    heldout = (directory / "heldout.txt").read_text()
    tokens = tokenizer(heldout, return_tensors="pt").input_ids[0]
    fp32 = _LocalModel(directory, WeightFormat.FP32)
    int8 = _LocalModel(directory, WeightFormat.INT8)
    int8_kv = _LocalModel(directory, WeightFormat.INT8, KVFormat.INT8)
    fp32_perplexity, int8_perplexity, int8_kv_perplexity = (
        _compute_perplexity(model, tokens) for model in (fp32, int8, int8_kv)
    )
    increase = 100 * (int8_perplexity / fp32_perplexity - 1)
    kv_increase = 100 * (int8_kv_perplexity / fp32_perplexity - 1)
    same, same_kv = (100 * _compare_greedy(model, texts) for model in (int8, int8_kv))
    bytes_per_parameter = int8.engine.num_weight_bytes / sum(_count_parameters(directory))
    say("loading")
    peak, final = _measure_loading_bytes(model.directory, "int8")
    over = _count_blocks_over(peak, final, 4 * _count_parameters(model.directory)[0])
    return [
        Figure("held-out perplexity, fp32", fp32_perplexity, ""),
        Figure("held-out perplexity, int8", int8_perplexity, ""),
        TargetFigure("its increase", increase, "%", at_most(1)),
        TargetFigure("greedy tokens equal to fp32", same, "%", at_least(98)),
        TargetFigure("increase with int8 caches, too", kv_increase, "%", at_most(1)),
        TargetFigure("greedy tokens equal, with int8 caches", same_kv, "%", at_least(98)),
        TargetFigure("weight bytes per parameter", bytes_per_parameter, "", at_most(1.05)),
        Figure("weights of the benchmark model", final / 2**20, "MiB"),
        TargetFigure("peak over the final size, in fp32 blocks", over, "", at_most(1)),
    ]


def _generate(reference: Any, prompt: list[int]) -> torch.Tensor:
    tokens_1T = torch.tensor([prompt])
    return reference.generate(tokens_1T, **make_text_settings(tokens_1T, _NUM_GREEDY_TOKENS))


def _count_parameters(directory: Path) -> list[int]:
    """Return how many numbers each block of a model has."""
    spec = read_spec(Checkpoint.open(directory).config)
    assert isinstance(spec, ModelSpec)
    return [
        sum(math.prod(shape) for shape in spec.tensor_shapes(block).values())
        for block in range(spec.num_blocks)
    ]
