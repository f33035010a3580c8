"""Qwen 3 with a mixture of experts in most blocks, or in all."""

from collections.abc import Mapping

from ...protocol.limits import MAX_BLOCKS
from .config_reader import (
    MAX_EXPERTS,
    MAX_INTERMEDIATE_SIZE,
    ConfigReader,
    read_common_fields,
    rename_fields,
)
from .family import Family
from .llama import PREFIXES
from .qwen3 import TENSOR_NAMES as QWEN3_TENSOR_NAMES
from .spec import ExpertsSpec, ModelSpec
from .windows import read_one_window

TENSOR_NAMES = {
    **QWEN3_TENSOR_NAMES,
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
}

# What transformers assumes where config.json is silent.
_DEFAULT_WINDOW = 4096
_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a configuration of Qwen 3 with experts."""
    config = {**_DEFAULTS, **rename_fields(config, {"num_local_experts": "num_experts"})}
    reader = ConfigReader(config)
    fields = read_common_fields(config)
    has_window = reader.flag("use_sliding_window", default=False)
    windows = read_one_window(config, fields["num_blocks"], default=_DEFAULT_WINDOW)
    has_attention_bias = reader.flag("attention_bias", default=False)
    return ModelSpec(
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=windows if has_window else (None,) * fields["num_blocks"],
        experts=_read_experts(reader, fields["num_blocks"]),
        **fields,
    )


def _read_experts(reader: ConfigReader, num_blocks: int) -> ExpertsSpec:
    """Return the experts; every `decoder_sparse_step`th block has them, unless it is listed."""
    period = reader.count("decoder_sparse_step", MAX_BLOCKS, default=1)
    listed = reader.indices("mlp_only_layers")
    return ExpertsSpec(
        num_experts=reader.count("num_experts", MAX_EXPERTS, default=128),
        num_chosen=reader.count("num_experts_per_tok", MAX_EXPERTS, default=8),
        intermediate_size=reader.count("moe_intermediate_size", MAX_INTERMEDIATE_SIZE, 768),
        is_normalized=reader.flag("norm_topk_prob", default=False),
        dense_blocks=frozenset(
            block for block in range(num_blocks) if (block + 1) % period or block in listed
        ),
    )


FAMILY = Family(name="qwen3_moe", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
