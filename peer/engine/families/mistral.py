"""Mistral 7B and Nemo: Llama's block with a sliding window in every block, or in none."""

from collections.abc import Mapping

from ..spec import MAX_POSITIONS, ConfigReader, ModelSpec, read_common_fields
from .llama import PREFIX, TENSOR_NAMES

__all__ = ["NAME", "PREFIX", "TENSOR_NAMES", "read_spec"]

NAME = "mistral"

# What transformers assumes where config.json is silent; null means full attention.
_DEFAULT_WINDOW = 4096


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Mistral configuration."""
    reader = ConfigReader(config)
    fields = read_common_fields({"num_key_value_heads": 8, **config})
    is_full = "sliding_window" in config and not reader.has("sliding_window")
    window = None if is_full else reader.count("sliding_window", MAX_POSITIONS, _DEFAULT_WINDOW)
    return ModelSpec(family=NAME, sliding_windows=(window,) * fields["num_blocks"], **fields)
