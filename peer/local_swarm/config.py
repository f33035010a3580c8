"""The settings of a local swarm, and the places of its peers."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.errors import UsageError
from ...protocol.spans import Span

Place = Span | int
"""The blocks of a peer: a span, or a number of blocks where the swarm needs them."""


@dataclass(frozen=True)
class LocalSwarmConfig:
    """The settings of a local swarm; its peers check those that are passed on to them."""

    weights: str = "int8"
    """Format of the block weights in memory: int8, bf16 or fp32."""

    num_threads: int = 1
    """Compute threads of each peer."""

    kv_budget_bytes: int = 2**28
    """Memory for the KV caches of each peer."""

    announce_period_seconds: float = 5.0
    """Interval between announcements; short, so that an interactive user sees changes soon."""

    ready_timeout_seconds: float = 120.0
    """Time for one peer to come online; generous for busy machines."""

    drain_seconds: float = 0.0
    """Time that `terminate` and `drain` give sessions to move to other peers."""

    serve_arguments: Sequence[str] = ()
    """Further arguments for every `shoal serve`."""


def make_place(given: object) -> Place:
    """Return a span that was given as such or as a pair of numbers, or how long one may be.

    The numbers may be of any library.

    >>> make_place((0, 4)), make_place(4)
    (Span(start=0, stop=4), 4)
    """
    if isinstance(given, Span):
        return given
    num_blocks = _read_whole(given)
    if num_blocks is not None and num_blocks > 0:
        return num_blocks
    numbers = [_read_whole(n) for n in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise UsageError(f"a span must be a pair of whole numbers such as (0, 4), not {given!r}")
    try:
        return Span(numbers[0], numbers[1])
    except ValueError as error:
        raise UsageError(f"{given!r} is not a span of blocks: {error}") from error


def _read_whole(given: object) -> int | None:
    """Return a whole number of any library as int, None for anything else."""
    try:
        return None if isinstance(given, bool) else operator.index(given)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
