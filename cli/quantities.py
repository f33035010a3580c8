"""Numbers on the command line, each refused in one sentence when it makes no sense."""

import argparse
import math

from ..protocol.limits import MAX_ANNOUNCEMENT_LIFETIME_SECONDS

_MAX_SEED = 2**63 - 1


def parse_count(text: str) -> int:
    """Read a whole number of at least 1.

    >>> parse_count("64")
    64
    """
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_whole(text: str) -> int:
    """Read a whole number from 0 on that fits into 63 bits."""
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def parse_non_negative(text: str) -> float:
    """Read a number of at least 0."""
    number = _parse_float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def parse_fraction(text: str) -> float:
    """Read a number above 0 and up to 1.

    >>> parse_fraction("0.9")
    0.9
    """
    number = _parse_float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return number


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def parse_port(text: str) -> int:
    """Read a port number; 0 stands for any free one.

    >>> parse_port("0"), parse_port("7000")
    (0, 7000)
    """
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def parse_announce_period(text: str) -> float:
    """Read how often to announce: what is too rare would be refused by everybody."""
    seconds = parse_non_negative(text)
    longest = MAX_ANNOUNCEMENT_LIFETIME_SECONDS / 3
    if not 0.1 <= seconds <= longest:
        raise argparse.ArgumentTypeError(f"the period is 0.1 to {longest:.0f} seconds, not {text}")
    return seconds
