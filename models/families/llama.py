"""Llama 2 and 3.x, and everything that calls itself `llama`."""

from collections.abc import Mapping

from .config_reader import ConfigReader, read_common_fields
from .family import Family
from .spec import ModelSpec

PREFIXES = ("model.layers.{block}.",)
TENSOR_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight",
    "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight",
    "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up": "mlp.up_proj.weight",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
}


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Llama configuration."""
    reader = ConfigReader(config)
    fields = read_common_fields(config)
    has_attention_bias = reader.flag("attention_bias", default=False)
    return ModelSpec(
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.flag("mlp_bias", default=False),
        sliding_windows=(None,) * fields["num_blocks"],
        **fields,
    )


FAMILY = Family(name="llama", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
