"""BLOOM: ALiBi, layer norms, a plain MLP, and queries, keys and values stored head by head."""

from collections.abc import Mapping

from ...kernels.layers.norm import NormKind
from ...protocol.errors import ModelError
from ..specs.config_reader import (
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
    MAX_POSITIONS,
    ConfigReader,
    read_common_fields,
    rename_fields,
)
from ..specs.model_spec import (
    AlibiSpec,
    BlockTensorNames,
    ClientPart,
    FusedOrder,
    MlpKind,
    ModelSpec,
)

TENSORS = BlockTensorNames(
    prefixes=("transformer.h.{block}.", "h.{block}."),
    names={
        "attention_norm": "input_layernorm.weight",
        "attention_norm_bias": "input_layernorm.bias",
        "query_key_value": "self_attention.query_key_value.weight",
        "query_key_value_bias": "self_attention.query_key_value.bias",
        "output": "self_attention.dense.weight",
        "output_bias": "self_attention.dense.bias",
        "mlp_norm": "post_attention_layernorm.weight",
        "mlp_norm_bias": "post_attention_layernorm.bias",
        "up": "mlp.dense_h_to_4h.weight",
        "up_bias": "mlp.dense_h_to_4h.bias",
        "down": "mlp.dense_4h_to_h.weight",
        "down_bias": "mlp.dense_4h_to_h.bias",
    },
    fused_order=FusedOrder.BY_GROUP,
)

CLIENT = ClientPart(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
)

_USUAL_NAMES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
}

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a BLOOM configuration."""
    settings: dict[str, object] = {**_DEFAULTS, **rename_fields(config, _USUAL_NAMES)}
    reader = ConfigReader(settings)
    if reader.flag("apply_residual_connection_post_layernorm", default=False):
        raise ModelError(
            "config.json: apply_residual_connection_post_layernorm is not supported for BLOOM"
        )
    settings |= {
        "intermediate_size": 4 * reader.count("hidden_size", MAX_INTERMEDIATE_SIZE // 4),
        "num_key_value_heads": reader.count("num_attention_heads", MAX_HEADS),
        "hidden_act": "gelu_pytorch_tanh",
        # Nothing in the model ends: the biases of ALiBi go on.
        "max_position_embeddings": MAX_POSITIONS,
    }
    fields = read_common_fields(settings)
    fields["rope_parameters"] = None
    return ModelSpec(
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
        norm_kind=NormKind.LAYER,
        mlp=MlpKind.PLAIN,
        alibi=AlibiSpec(),
        sliding_windows=(None,) * fields["num_blocks"],
        tensors=TENSORS,
        client=CLIENT,
        **fields,
    )
