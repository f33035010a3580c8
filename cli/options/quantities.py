"""Parsers of numbers, sizes, hosts and ports on the command line, each error one sentence; and how
numbers and sizes are shown.
"""

import argparse
import contextlib
import ipaddress
import math
import os
import re
from collections.abc import Callable

from ...protocol.errors import UsageError
from ...protocol.ids import MODEL_ID_CHARACTERS, ModelId
from ...protocol.limits import MAX_ANNOUNCEMENT_LIFETIME_SECONDS

_MAX_WHOLE = 2**63 - 1

_THREADS_PER_PROCESSOR = 4
"""More threads gain nothing, and far more crash the process."""

_PORT = re.compile(r"[0-9]{1,5}")  # int() raises for thousands of digits
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HOST_NAME = re.compile(r"(?!-)[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)


def count_of(number: int, noun: str) -> str:
    """Return how many there are of something.

    >>> count_of(1, "text"), count_of(2000, "text")
    ('1 text', '2,000 texts')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def show_bytes(num_bytes: int) -> str:
    """Return a size for people.

    >>> show_bytes(0), show_bytes(2**20), show_bytes(3 * 2**29)
    ('0 MiB', '1 MiB', '1.5 GiB')
    """
    is_large = num_bytes >= 2**30
    return f"{num_bytes / 2**30:.1f} GiB" if is_large else f"{num_bytes / 2**20:,.0f} MiB"


def _make_whole_parser(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on that fit into 63 bits."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if int(text) > _MAX_WHOLE:
            raise argparse.ArgumentTypeError(f"{text} is too large; the limit is {_MAX_WHOLE}")
        return int(text)

    return parse


def _make_number_parser(what: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of finite numbers; the error for all others says that they are not `what`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            number = float(text)
            if math.isfinite(number) and is_allowed(number):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


parse_count = _make_whole_parser(1)
parse_whole = _make_whole_parser(0)

parse_non_negative = _make_number_parser("a number of at least 0", lambda number: number >= 0)
parse_positive = _make_number_parser("a number above 0", lambda number: number > 0)
parse_fraction = _make_number_parser(
    "a number above 0 and at most 1", lambda number: 0 < number <= 1
)
parse_part = _make_number_parser(
    "a number of at least 0 and below 1", lambda number: 0 <= number < 1
)


def parse_text(text: str) -> str:
    """Read a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return text


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
    place = _parse_place(text)
    if place is None:
        raise UsageError(f"--listen takes HOST or HOST:PORT with a port up to 65535, not {text!r}")
    return place


def parse_metrics(text: str) -> tuple[str, int]:
    """Read PORT or HOST:PORT; without a host it is this machine only.

    >>> parse_metrics("9480"), parse_metrics("0.0.0.0:9480"), parse_metrics("[::1]:9480")
    (('127.0.0.1', 9480), ('0.0.0.0', 9480), ('::1', 9480))
    """
    has_port = text.rpartition(":")[2].isdecimal()
    place = _parse_place(text if ":" in text else f"127.0.0.1:{text}")
    if place is None or not has_port:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PORT or HOST:PORT with a port up to 65535"
        )
    return place


def _parse_place(text: str) -> tuple[str, int] | None:
    """Return a host and a port, 0 without one; None where it is something else."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if not host or (port and not _PORT.fullmatch(port)) or int(port or 0) >= 2**16:
        return None
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


def parse_model_id(text: str) -> ModelId:
    """Read the id of a model.

    >>> parse_model_id("Ab" * 16) == "ab" * 16
    True
    """
    if not re.fullmatch(rf"[0-9a-f]{{{MODEL_ID_CHARACTERS}}}", text.lower()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the id of a model: {MODEL_ID_CHARACTERS} digits and letters a to f"
        )
    return ModelId(text.lower())
