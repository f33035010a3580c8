"""What fields of several messages must satisfy; each check raises ValueError."""

import math

from ..ids import SESSION_ID_BYTES

NO_SESSION = bytes(SESSION_ID_BYTES)
"""What stands in the header of a message that speaks of no session."""

_MAX_SECONDS = 1e12


def check_session(value: bytes) -> None:
    """Raise ValueError unless this can be what a client calls a session, a pass or an upload."""
    if len(value) != SESSION_ID_BYTES or value == NO_SESSION:
        raise ValueError("the session id is missing or malformed")


def check_count(value: int, bound: int, name: str) -> None:
    """Raise ValueError unless a number is from 1 to a bound."""
    if not 0 < value <= bound:
        raise ValueError(f"{name} {value} is outside 1..{bound}")


def check_number(value: float, lowest: float, highest: float, name: str) -> None:
    """Raise ValueError unless a number is finite and within bounds, which are allowed as well."""
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest:g} to {highest:g}")


def check_seconds(*values: float) -> None:
    """Raise ValueError unless all of these can be durations."""
    for value in values:
        if not math.isfinite(value) or not 0 <= value <= _MAX_SECONDS:
            raise ValueError(f"{value} is not a duration")
