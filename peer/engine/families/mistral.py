"""Mistral 7B and Nemo: Llama's block with a sliding window in every block, or in none."""

from collections.abc import Mapping

from ..config_reader import read_common_fields
from ..spec import ModelSpec
from .family import Family
from .llama import PREFIXES, TENSOR_NAMES
from .windows import read_one_window

# What transformers assumes where config.json is silent.
_DEFAULT_WINDOW = 4096


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Mistral configuration."""
    fields = read_common_fields({"num_key_value_heads": 8, **config})
    windows = read_one_window(config, fields["num_blocks"], default=_DEFAULT_WINDOW)
    return ModelSpec(sliding_windows=windows, **fields)


FAMILY = Family(name="mistral", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
