"""Gemma 3 (text): Gemma 2 with norms on queries and keys, and rotations of their own for windows.

The models that also read images call themselves `gemma3` and are not supported.
"""

from collections.abc import Mapping

from .config_reader import ConfigReader, cover_whole_heads, read_common_fields, read_rope_parameters
from .family import Family
from .gemma2 import TENSOR_NAMES as GEMMA2_TENSOR_NAMES
from .gemma2 import name_activation, read_gemma_fields
from .llama import PREFIXES
from .spec import ModelSpec
from .windows import every_nth_full, read_typed_windows

TENSOR_NAMES = {
    **GEMMA2_TENSOR_NAMES,
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}

# What transformers assumes where config.json is silent.
_DEFAULT_WINDOW = 4096
_DEFAULT_PERIOD = 6
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0
_MAX_PERIOD = 2**16


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Gemma 3 text configuration."""
    reader = ConfigReader(config)
    rope, local_rope = _split_ropes(config)
    settings = name_activation({"max_position_embeddings": 131_072, **config, **rope})
    fields = read_common_fields(settings)
    period = reader.count("sliding_window_pattern", _MAX_PERIOD, _DEFAULT_PERIOD)
    return ModelSpec(
        **fields,
        **read_gemma_fields(config),
        has_qk_norm=True,
        local_rope_parameters=cover_whole_heads(read_rope_parameters({**settings, **local_rope})),
        sliding_windows=read_typed_windows(
            config, _DEFAULT_WINDOW, every_nth_full(fields["num_blocks"], period)
        ),
    )


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


FAMILY = Family(
    name="gemma3_text", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES
)
