"""Bounds for the numbers in a config.json, checked before transformers reads them.

Its configurations build lists as long as some of these numbers, layer by layer.
"""

import math
from collections.abc import Mapping, Sequence

from ...protocol.errors import ModelError

MAX_LAYERS = 4096
"""Far above any model, like the other."""

_MAX_NUMBER = 2**24
"""Positions of the longest texts, sizes of vocabularies."""

_ANY_NUMBER = (
    "theta", "seed", "position", "length", "token", "param", "flos", "base", "window",
)  # fmt: skip
"""In the names of numbers that may be larger, because nothing is counted up to them."""


def check_bounds(value: object, name: str = "config.json") -> None:
    """Raise ModelError, which names the field, for a number that no model has."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_bounds(part, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            check_bounds(part, name)
    elif isinstance(value, int | float) and value > (maximum := _find_maximum(name)):
        raise ModelError(f"config.json: {name:.60} must be at most {maximum}, got {value!s:.60}")


def _find_maximum(name: str) -> float:
    if any(part in name for part in _ANY_NUMBER):
        return math.inf
    return MAX_LAYERS if "layer" in name and "size" not in name else _MAX_NUMBER
