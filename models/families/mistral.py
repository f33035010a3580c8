"""Mistral: Llama's block with a sliding window in every block (7B), in none (Nemo), or in some."""

from collections.abc import Mapping

from ..specs.config_reader import (
    ConfigReader,
    read_common_fields,
    read_one_window,
    read_typed_windows,
)
from ..specs.model_spec import ModelSpec

# Defaults of transformers for fields that config.json lacks.
_DEFAULT_WINDOW = 4096


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Mistral configuration."""
    fields = read_common_fields({"num_key_value_heads": 8, **config})
    return ModelSpec(sliding_windows=_read_windows(config, fields["num_blocks"]), **fields)


def _read_windows(config: Mapping[str, object], num_blocks: int) -> tuple[int | None, ...]:
    # A Mistral with layer types is what transformers calls Ministral.
    if ConfigReader(config).has("layer_types"):
        return read_typed_windows(config, _DEFAULT_WINDOW, default_types=())
    return read_one_window(config, num_blocks, default=_DEFAULT_WINDOW)
