"""Qwen 2 and 2.5: Llama's block with biases on queries, keys and values."""

from collections.abc import Mapping

from ....protocol.errors import ModelError
from ..spec import MAX_POSITIONS, ConfigReader, ModelSpec, read_common_fields
from .llama import PREFIX, TENSOR_NAMES

__all__ = ["NAME", "PREFIX", "TENSOR_NAMES", "read_sliding_windows", "read_spec"]

NAME = "qwen2"

# What transformers assumes where config.json is silent.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_BLOCKS = 28


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Qwen 2 or 2.5 configuration."""
    fields = read_common_fields(config)
    return ModelSpec(
        family=NAME,
        has_qkv_bias=True,
        sliding_windows=read_sliding_windows(config, fields["num_blocks"]),
        **fields,
    )


def read_sliding_windows(config: Mapping[str, object], num_blocks: int) -> tuple[int | None, ...]:
    """Return the window of each block, which only counts where `use_sliding_window` is set.

    `layer_types` decides block by block; older configurations say from which block on instead.
    """
    reader = ConfigReader(config)
    is_null = "sliding_window" in config and not reader.has("sliding_window")
    if not reader.flag("use_sliding_window", default=False) or is_null:
        return (None,) * num_blocks

    window = reader.count("sliding_window", MAX_POSITIONS, _DEFAULT_WINDOW)
    if reader.has("layer_types"):
        windows = {"full_attention": None, "sliding_attention": window}
        layer_types = reader.texts("layer_types")
        if not set(layer_types) <= set(windows):
            raise ModelError(f"config.json: layer_types may only hold {', '.join(windows)}")
        return tuple(windows[layer_type] for layer_type in layer_types)
    first_sliding = config.get("max_window_layers", _DEFAULT_FULL_BLOCKS)
    if not isinstance(first_sliding, int) or first_sliding < 0:
        raise ModelError(f"config.json: max_window_layers is {first_sliding!r}, not a block index")
    return tuple(window if block >= first_sliding else None for block in range(num_blocks))
