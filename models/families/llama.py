"""Llama 2 and 3.x, and everything that calls itself `llama`."""

from collections.abc import Mapping

from ..specs.config_reader import ConfigReader, read_common_fields
from ..specs.model_spec import ModelSpec


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
