"""Byte counts as people write them."""

import argparse
import os

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
    """Read a size that this machine has the memory for."""
    num_bytes = parse_bytes(text)
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > machine_bytes:
        raise argparse.ArgumentTypeError(
            f"{text} is more than the {machine_bytes / 2**30:.1f}G of memory that this machine has"
        )
    return num_bytes
