"""What a client can be told: one frozen value."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.errors import UsageError


@dataclass(frozen=True)
class ClientConfig:
    """Settings of one client; the defaults are the only ones there are."""

    initial_peers: tuple[str, ...] = ()
    """Directory addresses to join through, as `shoal serve` prints them."""

    wire_dtype: str = "auto"
    """Type of hidden states on the wire: fp32, bf16, fp16, or auto: fp32 between fp32 peers, else
    bf16."""

    weights: str | None = None
    """Use only peers that hold their weights like this (int8, bf16, fp32); None: any."""

    connect_timeout_seconds: float = 5.0
    """How long one peer may take to accept a connection and open a session."""

    failover_timeout_seconds: float = 20.0
    """How long one step may look for peers before it fails with the blocks that are missing."""

    refresh_seconds: float = 10.0
    """How old the view of the swarm may be when a route is planned."""

    max_step_bytes: int = 4 * 2**20
    """Longer prompts are sent in pieces of at most this size."""

    seed: int | None = None
    """Seed of the noise that spreads clients over equally good peers; None: a random one."""


def make_initial_peers(given: object) -> tuple[str, ...]:
    """Return the addresses that were given: one, or several.

    >>> make_initial_peers("/ip4/…") == make_initial_peers(["/ip4/…"])
    True
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(peer, str) for peer in given):
        raise UsageError(f"initial_peers are addresses, ['/ip4/…'], not {given!r}")
    return tuple(given)


def make_whole(name: str, given: object) -> int:
    """Return a whole number of any library as int; raises UsageError for anything else.

    >>> make_whole("max_length", 7)
    7
    """
    try:
        if not isinstance(given, bool):
            return operator.index(given)  # pyright: ignore[reportArgumentType]
    except TypeError:
        pass
    raise UsageError(f"{name} is a whole number, not {given!r}")
