"""Falcon in its three forms: 7B (parallel, one key head), RW (ALiBi, sequential), 40B and 11B."""

from collections.abc import Mapping

import torch

from ...kernels.layers.norm import NormKind
from ...protocol.errors import ModelError
from ..specs.config_reader import (
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
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
    Residual,
)

TENSORS = BlockTensorNames(
    prefixes=("transformer.h.{block}.", "h.{block}."),
    # Models with one norm for each half of a parallel block call them otherwise.
    names={
        "attention_norm": ("input_layernorm.weight", "ln_attn.weight"),
        "attention_norm_bias": ("input_layernorm.bias", "ln_attn.bias"),
        "query_key_value": "self_attention.query_key_value.weight",
        "query_key_value_bias": "self_attention.query_key_value.bias",
        "output": "self_attention.dense.weight",
        "output_bias": "self_attention.dense.bias",
        "mlp_norm": ("post_attention_layernorm.weight", "ln_mlp.weight"),
        "mlp_norm_bias": ("post_attention_layernorm.bias", "ln_mlp.bias"),
        "up": "mlp.dense_h_to_4h.weight",
        "up_bias": "mlp.dense_h_to_4h.bias",
        "down": "mlp.dense_4h_to_h.weight",
        "down_bias": "mlp.dense_4h_to_h.bias",
    },
    fused_order=FusedOrder.BY_GROUP,
)

CLIENT = ClientPart(
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
)

_USUAL_NAMES = {
    "n_embed": "hidden_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation": "hidden_act",
    "ffn_hidden_size": "intermediate_size",
}

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Falcon configuration."""
    settings: dict[str, object] = {**_DEFAULTS, **rename_fields(config, _USUAL_NAMES)}
    reader = ConfigReader(settings)
    if not reader.has("intermediate_size"):
        settings["intermediate_size"] = 4 * reader.count("hidden_size", MAX_INTERMEDIATE_SIZE // 4)
    settings["num_key_value_heads"] = _count_kv_heads(reader)
    fields = read_common_fields(settings)
    alibi = None
    if reader.flag("alibi", default=False):
        # Falcon scales the biases like the scores, and multiplies them out in bfloat16.
        alibi = AlibiSpec(scale=fields["head_dim"] ** -0.5, dtype=torch.bfloat16)
        fields["rope_parameters"] = None
    has_bias = reader.flag("bias", default=False)
    residual, norms = _read_order(reader)
    return ModelSpec(
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        norm_kind=NormKind.LAYER,
        norms=norms,
        residual=residual,
        mlp=MlpKind.PLAIN,
        alibi=alibi,
        sliding_windows=(None,) * fields["num_blocks"],
        tensors=TENSORS,
        client=CLIENT,
        **fields,
    )


def _count_kv_heads(reader: ConfigReader) -> int:
    num_heads = reader.count("num_attention_heads", MAX_HEADS)
    if reader.flag("new_decoder_architecture", default=False):
        return reader.count("num_kv_heads", MAX_HEADS, default=num_heads)
    return 1 if reader.flag("multi_query", default=True) else num_heads


def _read_order(reader: ConfigReader) -> tuple[Residual, tuple[str, ...]]:
    """Return how a block's halves follow each other, and which norms it has."""
    is_new = reader.flag("new_decoder_architecture", default=False)
    num_norms = reader.count("num_ln_in_parallel_attn", 2, default=2 if is_new else 1)
    if not is_new and not reader.flag("parallel_attn", default=True):
        return Residual.SEQUENTIAL, ("attention_norm", "mlp_norm")
    if num_norms == 1:
        return Residual.PARALLEL, ("attention_norm",)
    if not is_new:
        raise ModelError("config.json: num_ln_in_parallel_attn 2 needs new_decoder_architecture")
    return Residual.PARALLEL, ("attention_norm", "mlp_norm")
