"""Qwen 2 and 2.5: Llama's block with biases on queries, keys and values."""

from collections.abc import Mapping

from ...protocol.errors import ModelError
from .config_reader import ConfigReader, read_common_fields
from .family import Family
from .llama import PREFIXES, TENSOR_NAMES
from .spec import ModelSpec
from .windows import full_until, read_typed_windows

# What transformers assumes where config.json is silent.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_BLOCKS = 28


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Read a Qwen 2 or 2.5 configuration."""
    fields = read_common_fields(config)
    return ModelSpec(
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

    first_sliding = config.get("max_window_layers", _DEFAULT_FULL_BLOCKS)
    if not isinstance(first_sliding, int) or first_sliding < 0:
        raise ModelError(f"config.json: max_window_layers is {first_sliding!r}, not a block index")
    return read_typed_windows(config, _DEFAULT_WINDOW, full_until(num_blocks, first_sliding))


FAMILY = Family(name="qwen2", read_spec=read_spec, prefixes=PREFIXES, tensor_names=TENSOR_NAMES)
