"""GPT-2: layer norms, a plain MLP, weights stored transposed; positions are the client's."""

from collections.abc import Mapping

from ...kernels.layers.norm import NormKind
from ...protocol.errors import ModelError
from ..specs.config_reader import (
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
    ConfigReader,
    read_common_fields,
    rename_fields,
)
from ..specs.model_spec import BlockTensorNames, ClientPart, MlpKind, ModelSpec

TENSORS = BlockTensorNames(
    prefixes=("transformer.h.{block}.", "h.{block}."),
    names={
        "attention_norm": "ln_1.weight",
        "attention_norm_bias": "ln_1.bias",
        "query_key_value": "attn.c_attn.weight",
        "query_key_value_bias": "attn.c_attn.bias",
        "output": "attn.c_proj.weight",
        "output_bias": "attn.c_proj.bias",
        "mlp_norm": "ln_2.weight",
        "mlp_norm_bias": "ln_2.bias",
        "up": "mlp.c_fc.weight",
        "up_bias": "mlp.c_fc.bias",
        "down": "mlp.c_proj.weight",
        "down_bias": "mlp.c_proj.bias",
    },
    stores_transposed=True,
)

CLIENT = ClientPart(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
)

_USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a GPT-2 configuration."""
    settings: dict[str, object] = {**_DEFAULTS, **rename_fields(config, _USUAL_NAMES)}
    reader = ConfigReader(settings)
    for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if reader.flag(name, default=False):
            raise ModelError(f"config.json: {name} is not supported for GPT-2")
    four_times = 4 * reader.count("hidden_size", MAX_INTERMEDIATE_SIZE // 4)
    settings |= {
        "intermediate_size": reader.count("n_inner", MAX_INTERMEDIATE_SIZE, default=four_times),
        "num_key_value_heads": reader.count("num_attention_heads", MAX_HEADS),
    }
    fields = read_common_fields(settings)
    fields["rope_parameters"] = None
    return ModelSpec(
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
        norm_kind=NormKind.LAYER,
        mlp=MlpKind.PLAIN,
        attention_scale=None if reader.flag("scale_attn_weights", default=True) else 1.0,
        sliding_windows=(None,) * fields["num_blocks"],
        tensors=TENSORS,
        client=CLIENT,
        **fields,
    )
