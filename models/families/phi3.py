"""Phi-3, 3.5 and 4 (mini): Llama's block with fused linears and, in some, partly rotated heads."""

from collections.abc import Mapping

from ...protocol.errors import ModelError
from ..specs.config_reader import (
    MAX_POSITIONS,
    ConfigReader,
    read_common_fields,
    read_one_window,
    read_rope_parameters,
)
from ..specs.model_spec import BlockTensorNames, ModelSpec

TENSORS = BlockTensorNames(
    names={
        "attention_norm": "input_layernorm.weight",
        "query_key_value": "self_attn.qkv_proj.weight",
        "output": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate_up": "mlp.gate_up_proj.weight",
        "down": "mlp.down_proj.weight",
    }
)

# Defaults of transformers for fields that config.json lacks.
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_DEFAULT_ORIGINAL_POSITIONS = 4096

_OLD_NAMES_OF_LONGROPE = ("su", "yarn")


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Phi-3 configuration."""
    config = _name_rope({**_DEFAULTS, **config})
    fields = read_common_fields(config)
    if fields["rope_parameters"]["rope_type"] == "default":
        fields["rope_parameters"] = read_rope_parameters(config)  # partial, if it says so
    windows = read_one_window(config, fields["num_blocks"], default=None)
    return ModelSpec(sliding_windows=windows, tensors=TENSORS, **fields)


def _name_rope(config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration with its rotation as other families spell it."""
    rope = dict(read_rope_parameters(config))
    rope.setdefault("partial_rotary_factor", 1.0)
    if rope["rope_type"] in _OLD_NAMES_OF_LONGROPE:
        rope["rope_type"] = "longrope"
    if rope["rope_type"] not in ("default", "longrope"):
        raise ModelError(
            f"config.json: Phi-3 has no rope_type {rope['rope_type']!r}; it is default or longrope"
        )
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = ConfigReader(config).count(
            "original_max_position_embeddings", MAX_POSITIONS, _DEFAULT_ORIGINAL_POSITIONS
        )
    return {**config, "rope_scaling": None, "rope_parameters": rope}
