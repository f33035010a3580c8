"""Mixtral: Mistral's block with a mixture of experts in place of the MLP."""

from collections.abc import Mapping

from ..specs.config_reader import (
    MAX_EXPERTS,
    ConfigReader,
    read_common_fields,
    read_one_window,
    rename_fields,
)
from ..specs.model_spec import LLAMA_TENSOR_NAMES, BlockTensorNames, ExpertsSpec, ModelSpec

TENSORS = BlockTensorNames(
    names={
        **LLAMA_TENSOR_NAMES,
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
        "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131_072,
}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Mixtral configuration."""
    config = {**_DEFAULTS, **rename_fields(config, {"num_experts": "num_local_experts"})}
    reader = ConfigReader(config)
    fields = read_common_fields(config)
    return ModelSpec(
        sliding_windows=read_one_window(config, fields["num_blocks"], default=None),
        experts=ExpertsSpec(
            num_experts=reader.count("num_local_experts", MAX_EXPERTS, default=8),
            num_chosen=reader.count("num_experts_per_tok", MAX_EXPERTS, default=2),
            intermediate_size=fields["intermediate_size"],
            is_normalized=True,
        ),
        tensors=TENSORS,
        **fields,
    )
