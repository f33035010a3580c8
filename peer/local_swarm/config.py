"""The settings of a local swarm, checked before any peer is started."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.spans import Span

Place = Span | int
"""The blocks of a peer: a span, or a number of blocks where the swarm needs them."""


@dataclass(frozen=True)
class LocalSwarmConfig:
    """The settings of the peers of a local swarm."""

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

    def __post_init__(self) -> None:
        """Raise UsageError that names a setting of a wrong type; peers check the values."""
        for name in ("num_threads", "kv_budget_bytes"):
            if _read_whole(getattr(self, name)) is None:
                raise UsageError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        for name in ("announce_period_seconds", "ready_timeout_seconds"):
            if not _is_positive(getattr(self, name)):
                raise UsageError(
                    f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}"
                )
        if self.drain_seconds != 0 and not _is_positive(self.drain_seconds):
            raise UsageError(
                "drain_seconds must be a number of seconds of at least 0, not "
                f"{self.drain_seconds!r}"
            )
        if not _is_list_of_words(self.serve_arguments):
            raise UsageError(
                "serve_arguments must be a list of words such as ('--drain', '5'), not "
                f"{self.serve_arguments!r}"
            )


def make_config(settings: dict[str, Any]) -> LocalSwarmConfig:
    """Return the configuration for some settings; raises UsageError for unknown ones."""
    known = [field.name for field in fields(LocalSwarmConfig)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UsageError(
            f"LocalSwarm does not know {', '.join(unknown)}; settings are {', '.join(known)}"
        )
    return LocalSwarmConfig(**settings)


def make_places(given: object) -> list[Place]:
    """Return the places of the peers of a swarm; raises UsageError if there are none."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f"spans must be one per peer, such as [(0, 4), (4, 8)], not {given!r}")
    if not given:
        raise UsageError("a swarm needs at least one span")
    return [make_place(place) for place in given]


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


def _is_positive(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return math.isfinite(given) and given > 0


def _is_list_of_words(given: object) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(word, str) for word in given)
