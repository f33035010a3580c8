"""The models that are measured: a random Llama that all published figures use, and the bundled
one where a tiny one will do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.cli.benchmarking.swarm_speed import make_hidden
from shoal.cli.options.bundled_model import find_model, read_configuration
from shoal.models.checkpoints.fingerprint import CACHE_DIRECTORY


@dataclass(frozen=True)
class BenchmarkModel:
    """A model directory, and what one has to know to make up inputs for it."""

    directory: Path
    num_blocks: int
    hidden_size: int
    vocabulary_size: int

    @classmethod
    def open(cls, directory: Path) -> "BenchmarkModel":
        """Read the configuration of a model."""
        config = read_configuration(str(directory))
        return cls(
            directory, config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
        )

    @property
    def halves(self) -> list[tuple[int, int]]:
        """The spans of two peers that share the blocks."""
        middle = self.num_blocks // 2
        return [(0, middle), (middle, self.num_blocks)]

    def make_hidden(self, num_tokens: int, num_rows: int = 1) -> Tensor:
        """Return new random hidden states [B, T, H]: never the same, since peers may remember."""
        return make_hidden(self.hidden_size, num_tokens, num_rows)

    def make_tokens(self, num_rows: int, num_tokens: int) -> Tensor:
        """Return new random tokens [B, T]."""
        return torch.randint(0, self.vocabulary_size, (num_rows, num_tokens))


def open_bundled_model() -> BenchmarkModel:
    """Return the small model that comes with shoal."""
    return BenchmarkModel.open(Path(find_model()))


def make_benchmark_model() -> BenchmarkModel:
    """Return the model of the published figures, written to the user's cache with the first call.

    A random Llama in bf16: hidden 1024, intermediate 2816, 16 blocks, 16 heads, 4 KV heads,
    vocabulary 32000.
    """
    return _make_model(
        "llama-180m",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=8192,
    )


def make_wide_model(num_blocks: int) -> BenchmarkModel:
    """Return a random Llama whose hidden states are as wide as those of large models, 2048, and
    whose blocks are thin: where peers are far apart, what is to be seen is the network.
    """
    return _make_model(
        f"llama-wide-{num_blocks}",
        hidden_size=2048,
        intermediate_size=256,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=256,
        max_position_embeddings=8192,
    )


def _make_model(name: str, **settings: Any) -> BenchmarkModel:
    directory = (CACHE_DIRECTORY / "benchmarks" / name).expanduser()
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))  # its own types do not fit its calls
        unfinished = directory.with_name(f"{directory.name}.new")
        model.to(torch.bfloat16).save_pretrained(unfinished)
        unfinished.rename(directory)
    return BenchmarkModel.open(directory)
