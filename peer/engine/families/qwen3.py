"""Qwen 3 (dense): Llama's block with norms on queries and keys and an explicit head size."""

from collections.abc import Mapping

from ..spec import ConfigReader, ModelSpec, read_common_fields
from .llama import PREFIX
from .llama import TENSOR_NAMES as LLAMA_TENSOR_NAMES
from .qwen2 import read_sliding_windows

__all__ = ["NAME", "PREFIX", "TENSOR_NAMES", "read_spec"]

NAME = "qwen3"
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
        family=NAME,
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=read_sliding_windows(config, fields["num_blocks"]),
        **fields,
    )
