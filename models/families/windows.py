"""Which blocks attend through a sliding window, in the spellings of several families."""

from collections.abc import Mapping, Sequence

from ...protocol.errors import ModelError
from .config_reader import MAX_POSITIONS, ConfigReader

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_one_window(
    config: Mapping[str, object], num_blocks: int, default: int | None
) -> tuple[int | None, ...]:
    """Return the one window of all blocks; null means full attention, silence the default."""
    reader = ConfigReader(config)
    is_full = not reader.has("sliding_window") and ("sliding_window" in config or default is None)
    window = None if is_full else reader.count("sliding_window", MAX_POSITIONS, default)
    return (window,) * num_blocks


def read_typed_windows(
    config: Mapping[str, object], default_window: int, default_types: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the window of each block where `layer_types` says which blocks have one."""
    reader = ConfigReader(config)
    layer_types = reader.texts("layer_types") if reader.has("layer_types") else default_types
    if not set(layer_types) <= {_FULL, _SLIDING}:
        raise ModelError(f"config.json: layer_types may only hold {_FULL}, {_SLIDING}")
    if "sliding_window" in config and not reader.has("sliding_window") and _SLIDING in layer_types:
        raise ModelError("config.json: sliding_window is null, but layer_types names such blocks")
    window = reader.count("sliding_window", MAX_POSITIONS, default_window)
    return tuple(window if layer_type == _SLIDING else None for layer_type in layer_types)


def every_nth_full(num_blocks: int, period: int) -> list[str]:
    """Return layer types of which the last of each `period` blocks has full attention.

    >>> every_nth_full(3, 2)
    ['sliding_attention', 'full_attention', 'sliding_attention']
    """
    return [_SLIDING if (block + 1) % period else _FULL for block in range(num_blocks)]


def full_until(num_blocks: int, first_sliding: int) -> list[str]:
    """Return layer types with full attention in the first blocks only.

    >>> full_until(3, 1)
    ['full_attention', 'sliding_attention', 'sliding_attention']
    """
    return [_SLIDING if block >= first_sliding else _FULL for block in range(num_blocks)]
