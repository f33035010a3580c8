"""Bounds for fields of messages. A check raises ValueError; `wire/` says whose fault it is."""

import math
from collections.abc import Callable
from typing import Any

from .. import limits
from ..ids import ADAPTER_ID_BYTES, MODEL_ID_CHARACTERS, NO_SESSION, SESSION_ID_BYTES
from ..spans import Span

Check = Callable[[Any], None]
"""Raises ValueError unless a field may have the value."""

_MAX_SECONDS = 1e12


def check_session(value: bytes) -> None:
    """Raise ValueError unless this can be the id of a session, a pass or an upload."""
    if len(value) != SESSION_ID_BYTES or value == NO_SESSION:
        raise ValueError("the session id is missing or malformed")


def check_model_id(value: str) -> None:
    """Raise ValueError unless this can be the id of a model."""
    if len(value) != MODEL_ID_CHARACTERS or not value.isalnum() or not value.isascii():
        raise ValueError("malformed model id")


def check_span(value: Span) -> None:
    """Raise ValueError for a span beyond the blocks that a model can have."""
    if value.stop > limits.MAX_BLOCKS:
        raise ValueError(f"block {value.stop} is beyond {limits.MAX_BLOCKS}")


def check_position(value: int) -> None:
    """Raise ValueError unless a session can be this long."""
    if not 0 <= value <= limits.MAX_SESSION_TOKENS:
        raise ValueError(f"position {value} is beyond {limits.MAX_SESSION_TOKENS}")


def check_count(value: float, bound: int, name: str) -> None:
    """Raise ValueError unless a number is from 1 to a bound."""
    if not 0 < value <= bound:
        raise ValueError(f"{name} {value} is outside 1..{bound}")


def check_number(value: float, lowest: float, highest: float, name: str) -> None:
    """Raise ValueError unless a number is finite and within bounds, which are allowed as well."""
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest:g} to {highest:g}")


def check_seconds(value: float) -> None:
    """Raise ValueError unless this can be a duration."""
    if not 0 <= value <= _MAX_SECONDS:  # NaN is neither
        raise ValueError(f"{value} is not a duration")


def check_text(value: str) -> None:
    """Raise ValueError for a text that is long, or that could steer the terminal it is shown on.

    >>> check_text("the peer is about to leave")
    >>> check_text("\x1b[2J")
    Traceback (most recent call last):
    ...
    ValueError: a text has characters that cannot be printed
    """
    if len(value) > limits.MAX_TEXT_CHARACTERS:
        raise ValueError(f"a text of {len(value)} characters is too long")
    if not value.isprintable():
        raise ValueError("a text has characters that cannot be printed")


def clean_text(value: str) -> str:
    """Return a text as `check_text` accepts it: cut, and without what cannot be printed.

    >>> clean_text("two\\nlines")
    'two lines'
    """
    cut = value[: limits.MAX_TEXT_CHARACTERS]
    return "".join(character if character.isprintable() else " " for character in cut)


def count_to(bound: int, name: str) -> Check:
    """Return a check for a number from 1 to a bound."""
    return lambda value: check_count(value, bound, name)


def index_below(bound: int) -> Check:
    """Return a check for an index below a bound."""
    return lambda value: check_count(value + 1, bound, "offset")


def number_in(lowest: float, highest: float, name: str) -> Check:
    """Return a check for a finite number within bounds, which are allowed as well."""
    return lambda value: check_number(value, lowest, highest, name)


def sized(num_bytes: int, name: str) -> Check:
    """Return a check for bytes of a fixed length."""

    def check(value: bytes) -> None:
        if len(value) != num_bytes:
            raise ValueError(f"{name} has {num_bytes} bytes, not {len(value)}")

    return check


def sized_or_none(num_bytes: int, name: str) -> Check:
    """Return a check for bytes of a fixed length, or none."""
    check = sized(num_bytes, name)
    return lambda value: check(value) if value else None


check_adapter = sized_or_none(ADAPTER_ID_BYTES, "an adapter's digest")
"""Raise ValueError unless this can be the digest of an adapter, or of none."""


def not_empty(complaint: str) -> Check:
    """Return a check for a value that is not empty."""

    def check(value: object) -> None:
        if not value:
            raise ValueError(complaint)

    return check
