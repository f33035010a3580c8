"""Qwen 3 (dense): Llama's block with norms on queries and keys and an explicit head size."""

from collections.abc import Mapping

from .config_reader import ConfigReader, read_common_fields
from .family import Family
from .llama import PREFIXES
from .llama import TENSOR_NAMES as LLAMA_TENSOR_NAMES
from .qwen2 import read_sliding_windows
from .spec import ModelSpec

TENSOR_NAMES = {
    **LLAMA_TENSOR_NAMES,
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}

# What transformers assumes where config.json is silent.
_DEFAULT_HEAD_DIM = 128


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Qwen 3 configuration."""
    reader = ConfigReader(config)
    fields = read_common_fields({"head_dim": _DEFAULT_HEAD_DIM, **config})
    has_attention_bias = reader.flag("attention_bias", default=False)
    return ModelSpec(
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=read_sliding_windows(config, fields["num_blocks"]),
        **fields,
    )


FAMILY = Family(name="qwen3", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
