"""Qwen 2, 2.5 and 3: Llama's block with biases (2) or norms (3) on queries and keys.

Those of Qwen 3 with experts have a model type of their own.
"""

from collections.abc import Mapping

from ...protocol.errors import ModelError
from ...protocol.limits import MAX_BLOCKS
from ..specs.config_reader import (
    MAX_EXPERTS,
    MAX_INTERMEDIATE_SIZE,
    ConfigReader,
    full_until,
    read_common_fields,
    read_one_window,
    read_typed_windows,
    rename_fields,
)
from ..specs.model_spec import LLAMA_TENSOR_NAMES, BlockTensorNames, ExpertsSpec, ModelSpec

TENSORS_WITH_EXPERTS = BlockTensorNames(
    names={
        **LLAMA_TENSOR_NAMES,
        "router": "mlp.gate.weight",
        "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
        "expert_up": "mlp.experts.{expert}.up_proj.weight",
        "expert_down": "mlp.experts.{expert}.down_proj.weight",
    }
)

# Defaults of transformers for fields that config.json lacks.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_BLOCKS = 28
_DEFAULT_HEAD_DIM = 128  # of Qwen 3 without experts
_DEFAULTS_WITH_EXPERTS = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}


def read_qwen2(config: Mapping[str, object]) -> ModelSpec:
    """Read a Qwen 2 or 2.5 configuration."""
    fields = read_common_fields(config)
    return ModelSpec(
        has_qkv_bias=True,
        sliding_windows=_read_windows(config, fields["num_blocks"]),
        **fields,
    )


def read_qwen3(config: Mapping[str, object]) -> ModelSpec:
    """Read a Qwen 3 configuration, without experts and with an explicit head size."""
    fields = read_common_fields({"head_dim": _DEFAULT_HEAD_DIM, **config})
    has_attention_bias = ConfigReader(config).flag("attention_bias", default=False)
    return ModelSpec(
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=_read_windows(config, fields["num_blocks"]),
        **fields,
    )


def read_qwen3_moe(config: Mapping[str, object]) -> ModelSpec:
    """Read a configuration of Qwen 3 with experts."""
    config = {
        **_DEFAULTS_WITH_EXPERTS,
        **rename_fields(config, {"num_local_experts": "num_experts"}),
    }
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
        tensors=TENSORS_WITH_EXPERTS,
        **fields,
    )


def _read_windows(config: Mapping[str, object], num_blocks: int) -> tuple[int | None, ...]:
    """Return the window of each block, which only counts where `use_sliding_window` is set.

    `layer_types` decides block by block; older configurations say from which block on instead.
    """
    reader = ConfigReader(config)
    is_null = "sliding_window" in config and not reader.has("sliding_window")
    if not reader.flag("use_sliding_window", default=False) or is_null:
        return (None,) * num_blocks

    first_sliding = config.get("max_window_layers", _DEFAULT_FULL_BLOCKS)
    if not isinstance(first_sliding, int) or first_sliding < 0:
        raise ModelError(f"config.json: max_window_layers is {first_sliding!r}, not a block index")
    return read_typed_windows(config, _DEFAULT_WINDOW, full_until(num_blocks, first_sliding))


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
