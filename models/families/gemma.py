"""Gemma 1: Llama's block with Gemma's norms, large heads and a gated GELU."""

from collections.abc import Mapping

from ...protocol.errors import ModelError
from .config_reader import ConfigReader, read_common_fields
from .family import Family
from .llama import PREFIXES, TENSOR_NAMES
from .spec import ModelSpec

# What transformers assumes where config.json is silent.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 1 configuration."""
    reader = ConfigReader(config)
    if reader.flag("use_bidirectional_attention", default=False):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    fields = read_common_fields({**_DEFAULTS, **config})
    if fields["activation"] == "gelu":
        # The first releases say so and mean the approximation.
        fields["activation"] = "gelu_pytorch_tanh"
    has_attention_bias = reader.flag("attention_bias", default=False)
    return ModelSpec(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        norm_offset=1.0,
        sliding_windows=(None,) * fields["num_blocks"],
        **fields,
    )


FAMILY = Family(name="gemma", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
