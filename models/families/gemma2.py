"""Gemma 2: norms around both halves of a block, capped scores, a window in every other block."""

from collections.abc import Mapping
from typing import Any

from ...protocol.errors import ModelError
from .config_reader import ConfigReader, read_common_fields
from .family import Family
from .llama import PREFIXES
from .llama import TENSOR_NAMES as LLAMA_TENSOR_NAMES
from .spec import ModelSpec
from .windows import every_nth_full, read_typed_windows

TENSOR_NAMES = {
    **LLAMA_TENSOR_NAMES,
    "attention_output_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}

# What transformers assumes where config.json is silent.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_DEFAULT_QUERY_SCALAR = 256
_DEFAULT_WINDOW = 4096
_DEFAULT_SOFTCAP = 50.0


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 2 configuration."""
    fields = read_common_fields(name_activation({"max_position_embeddings": 8192, **config}))
    return ModelSpec(
        **fields,
        **read_gemma_fields(config),
        attention_softcap=ConfigReader(config).number_or_none(
            "attn_logit_softcapping", _DEFAULT_SOFTCAP
        ),
        sliding_windows=read_typed_windows(
            config, _DEFAULT_WINDOW, every_nth_full(fields["num_blocks"], period=2)
        ),
    )


def name_activation(config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration with Gemma's defaults and its activation under the usual name."""
    activation = config.get("hidden_activation", _DEFAULTS["hidden_act"])
    if activation is None:
        raise ModelError("config.json: hidden_activation is null, but this family has no other")
    return {**_DEFAULTS, **config, "hidden_act": activation}


def read_gemma_fields(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a ModelSpec that Gemma 2 and 3 share."""
    reader = ConfigReader(config)
    if reader.flag("use_bidirectional_attention", default=False):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    has_attention_bias = reader.flag("attention_bias", default=False)
    return {
        "has_qkv_bias": has_attention_bias,
        "has_output_bias": has_attention_bias,
        "norms": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
        "norm_offset": 1.0,
        "attention_scale": reader.number("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR) ** -0.5,
    }


FAMILY = Family(name="gemma2", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
