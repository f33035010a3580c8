"""Parsers of numbers, sizes, hosts and ports on the command line; each error is one sentence."""

import argparse
import contextlib
import ipaddress
import math
import os
import re

from ...protocol.errors import UsageError
from ...protocol.limits import MAX_ANNOUNCEMENT_LIFETIME_SECONDS

_MAX_SEED = 2**63 - 1

_THREADS_PER_PROCESSOR = 4
"""More threads gain nothing, and far more crash the process."""

_PORT = re.compile(r"[0-9]{1,5}")  # int() raises for thousands of digits
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HOST_NAME = re.compile(r"(?!-)[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)


def parse_count(text: str) -> int:
    """Read a whole number of at least 1.

    >>> parse_count("64")
    64
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return _check_size(text)


def count_of(number: int, noun: str) -> str:
    """Return how many there are of something.

    >>> count_of(1, "text"), count_of(2000, "text")
    ('1 text', '2,000 texts')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def parse_threads(text: str) -> int:
    """Read a number of threads that this machine can run."""
    num_threads = parse_count(text)
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if num_threads > most:
        raise argparse.ArgumentTypeError(
            f"{text} threads are too many for this machine; use at most {most}, "
            f"{_THREADS_PER_PROCESSOR} per processor"
        )
    return num_threads


def _check_size(text: str) -> int:
    if int(text) > _MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is too large; the limit is {_MAX_SEED}")
    return int(text)


def parse_whole(text: str) -> int:
    """Read a whole number from 0 on that fits into 63 bits."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return _check_size(text)


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return number


def parse_part(text: str) -> float:
    """Read a number from 0 on and below 1.

    >>> parse_part("0"), parse_part("0.05")
    (0.0, 0.05)
    """
    number = _parse_float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1")
    return number


def parse_positive(text: str) -> float:
    """Read a number above 0."""
    number = _parse_float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
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
    """Read the period of announcements; peers refuse announcements with a longer lifetime."""
    seconds = parse_non_negative(text)
    longest = MAX_ANNOUNCEMENT_LIFETIME_SECONDS / 3
    if not 0.1 <= seconds <= longest:
        raise argparse.ArgumentTypeError(f"the period is 0.1 to {longest:.0f} seconds, not {text}")
    return seconds


def parse_host(text: str) -> str:
    """Read a name or an address that others can dial.

    >>> parse_host("peer.example.org"), parse_host("192.0.2.1"), parse_host("2001:db8::1")
    ('peer.example.org', '192.0.2.1', '2001:db8::1')
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return text
    last_label = text.rstrip(".").rpartition(".")[2]
    if not _HOST_NAME.fullmatch(text) or last_label.isdecimal() or len(text) > 253:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name or address of a host")
    return text


def parse_listen(text: str) -> tuple[str, int]:
    """Read HOST or HOST:PORT; port 0 means any free one.

    >>> parse_listen("0.0.0.0:7000"), parse_listen("127.0.0.1"), parse_listen("[::1]:70")
    (('0.0.0.0', 7000), ('127.0.0.1', 0), ('::1', 70))
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if not host or (port and not _PORT.fullmatch(port)) or int(port or 0) >= 2**16:
        raise UsageError(f"--listen takes HOST or HOST:PORT with a port up to 65535, not {text!r}")
    return host, int(port or 0)


def parse_bytes(text: str) -> int:
    """Read `512M`, `4G` or a plain number of bytes.

    >>> parse_bytes("2K"), parse_bytes("1.5M"), parse_bytes("77")
    (2048, 1572864, 77)
    """
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        num_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 4G") from None
    if num_bytes < 0:
        raise argparse.ArgumentTypeError(f"a size cannot be negative: {text}")
    return num_bytes


def parse_memory(text: str) -> int:
    """Read a size that is at most the memory of this machine."""
    num_bytes = parse_bytes(text)
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > machine_bytes:
        raise argparse.ArgumentTypeError(
            f"{text} is more than the {machine_bytes / 2**30:.1f}G of memory that this machine has"
        )
    return num_bytes
