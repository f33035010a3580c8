"""Bounds for the numbers in a config.json, checked before transformers reads them.

Its configurations build lists as long as some of these numbers, layer by layer.
"""

from collections.abc import Iterator, Mapping, Sequence

from ...protocol.errors import ModelError

MAX_LAYERS = 4096
"""Far above any model, like all of these."""

_MAX_LABELS = 2**16
_MAX_NUMBER = 2**24
"""Positions of the longest texts, sizes of vocabularies."""

_MAX_DEPTH = 16
_MAX_VALUES = 2**20

_ANY_NUMBER = (
    "theta", "seed", "position", "length", "token", "param", "flos", "base", "window",
)  # fmt: skip
"""In the names of numbers that may be larger, because nothing is counted up to them."""


def check_bounds(fields: Mapping[str, object]) -> None:
    """Raise ModelError, which names the field, for a number that no model has."""
    for name, value in fields.items():
        values = list(_walk(name, value, 0))
        if len(values) > _MAX_VALUES:
            raise ModelError(f"config.json: {name:.60} has more than {_MAX_VALUES} values")
        for key, number, _ in values:
            maximum = _find_maximum(key)
            if maximum is not None and _is_above(number, maximum):
                raise ModelError(
                    f"config.json: {key:.60} must be at most {maximum}, got {number!s:.60}"
                )
        # GPT-Neo names its blocks by lists of names, each with how often it comes.
        counts = [number for _, number, depth in values if depth > 1 and isinstance(number, int)]
        if counts and max(counts) * len(values) > _MAX_NUMBER:
            raise ModelError(
                f"config.json: numbers in {name:.60} must be at most {_MAX_NUMBER // len(values)}, "
                f"got {max(counts)!s:.60}"
            )


def _walk(key: str, value: object, depth: int) -> Iterator[tuple[str, object, int]]:
    """Yield the parts of a value, each with its key and the number of lists around it."""
    if depth > _MAX_DEPTH:
        raise ModelError(f"config.json: {key:.60} has lists in lists that are too deep")
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _walk(str(name), part, depth)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from _walk(key, part, depth + 1)
    else:
        yield key, value, depth


def _find_maximum(key: str) -> int | None:
    if "label" in key:
        return _MAX_LABELS
    if any(part in key for part in _ANY_NUMBER):
        return None
    if "layer" in key and "size" not in key:
        return MAX_LAYERS
    return _MAX_NUMBER


def _is_above(number: object, maximum: int) -> bool:
    # A fraction is counted up to only where it is a number of layers.
    kinds = (int, float) if maximum == MAX_LAYERS else int
    return isinstance(number, kinds) and number > maximum
