"""Gemma 1, 2 and 3 (text): norms with an offset of one, large heads and a gated GELU.

The models of Gemma 3 that also read images call themselves `gemma3` and are not supported.
"""

from collections.abc import Mapping
from typing import Any

from ...protocol.errors import ModelError
from ..specs.config_reader import (
    ConfigReader,
    cover_whole_heads,
    every_nth_full,
    read_common_fields,
    read_rope_parameters,
    read_typed_windows,
)
from ..specs.model_spec import LLAMA_TENSOR_NAMES, BlockTensorNames, ClientPart, ModelSpec

TENSORS_OF_2 = BlockTensorNames(
    names={
        **LLAMA_TENSOR_NAMES,
        "attention_output_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_output_norm": "post_feedforward_layernorm.weight",
    }
)
"""Of Gemma 3 as well. Those of Gemma 1 are the usual ones."""

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_DEFAULTS_OF_1 = {**_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192}
_DEFAULTS_OF_2 = {**_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 8192}
_DEFAULTS_OF_3 = {**_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
_DEFAULT_QUERY_SCALAR = 256
_DEFAULT_WINDOW = 4096
_DEFAULT_SOFTCAP = 50.0
_DEFAULT_LOGIT_SOFTCAP_OF_2 = 30.0
_PERIOD_OF_2 = 2
_DEFAULT_PERIOD_OF_3 = 6
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0
_MAX_PERIOD = 2**16


def read_gemma1(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 1 configuration: Llama's block with Gemma's norms."""
    fields = read_common_fields({**_DEFAULTS_OF_1, **config})
    if fields["activation"] == "gelu":
        # The first releases say so and mean the approximation.
        fields["activation"] = "gelu_pytorch_tanh"
    return ModelSpec(
        **fields,
        **_read_gemma_fields(config),
        client=ClientPart(scales_embedding=True),
        sliding_windows=(None,) * fields["num_blocks"],
    )


def read_gemma2(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 2 configuration: norms around both halves, capped scores, windows."""
    fields = read_common_fields(_name_activation({**_DEFAULTS_OF_2, **config}))
    return ModelSpec(
        **fields,
        **_read_gemma_fields(config),
        **_read_fields_of_2(config, _DEFAULT_LOGIT_SOFTCAP_OF_2),
        attention_softcap=ConfigReader(config).number_or_none(
            "attn_logit_softcapping", _DEFAULT_SOFTCAP
        ),
        sliding_windows=read_typed_windows(
            config, _DEFAULT_WINDOW, every_nth_full(fields["num_blocks"], _PERIOD_OF_2)
        ),
    )


def read_gemma3(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 3 text configuration.

    Gemma 2 with norms on queries and keys, and rotations of their own for windows.
    """
    rope, local_rope = _split_ropes(config)
    settings = _name_activation({**_DEFAULTS_OF_3, **config, **rope})
    fields = read_common_fields(settings)
    period = ConfigReader(config).count("sliding_window_pattern", _MAX_PERIOD, _DEFAULT_PERIOD_OF_3)
    return ModelSpec(
        **fields,
        **_read_gemma_fields(config),
        **_read_fields_of_2(config, default_logit_softcap=None),
        has_qk_norm=True,
        local_rope_parameters=cover_whole_heads(read_rope_parameters({**settings, **local_rope})),
        sliding_windows=read_typed_windows(
            config, _DEFAULT_WINDOW, every_nth_full(fields["num_blocks"], period)
        ),
    )


def _name_activation(config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration with its activation under the usual name."""
    activation = config.get("hidden_activation", _DEFAULTS["hidden_act"])
    if activation is None:
        raise ModelError("config.json: hidden_activation is null; this family needs it")
    return {**config, "hidden_act": activation}


def _read_gemma_fields(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a ModelSpec that all of them share."""
    reader = ConfigReader(config)
    if reader.flag("use_bidirectional_attention", default=False):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    has_attention_bias = reader.flag("attention_bias", default=False)
    return {
        "has_qkv_bias": has_attention_bias,
        "has_output_bias": has_attention_bias,
        "norm_offset": 1.0,
    }


def _read_fields_of_2(
    config: Mapping[str, object], default_logit_softcap: float | None
) -> dict[str, Any]:
    reader = ConfigReader(config)
    query_scalar = reader.number("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR)
    softcap = reader.number_or_none("final_logit_softcapping", default_logit_softcap)
    return {
        "norms": ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
        "attention_scale": query_scalar**-0.5,
        "tensors": TENSORS_OF_2,
        "client": ClientPart(scales_embedding=True, logit_softcap=softcap),
    }


def _split_ropes(config: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the rotary fields of blocks with full attention and of those with a window.

    Transformers 5 has one object for each inside of `rope_parameters`; checkpoints of
    transformers 4 have a base each, and scale only the rotations of full attention. An original
    length beside two rotations is that of neither.
    """
    reader = ConfigReader(config)
    ropes = ConfigReader(reader.mapping("rope_parameters"))
    scaling = reader.mapping("rope_scaling")
    full = {
        "original_max_position_embeddings": None,
        "rope_theta": reader.number("rope_theta", _DEFAULT_THETA),
        "rope_scaling": None,
        "rope_parameters": {**ropes.mapping("full_attention"), **scaling},
    }
    local = {
        "original_max_position_embeddings": None,
        "rope_theta": reader.number("rope_local_base_freq", _DEFAULT_LOCAL_THETA),
        "rope_scaling": None,
        "rope_parameters": ropes.mapping("sliding_attention"),
    }
    return full, local
