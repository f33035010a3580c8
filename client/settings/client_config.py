"""The settings of a client, as one frozen value, and checks of single ones."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...kernels.linear.quantize import WeightFormat
from ...protocol.errors import UsageError
from ...protocol.limits import MAX_SESSION_TOKENS
from ...protocol.membership.join_code import JoinCode
from ...protocol.tensors import KVFormat, WireDtype


@dataclass(frozen=True)
class ClientConfig:
    """Settings of one client. The defaults are defined here and nowhere else."""

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to join through, as `shoal serve` prints them."""

    join: str = field(default="", repr=False)
    """Join code of the swarm, `shoal:…`; for a private swarm it is a secret."""

    wire_dtype: str = "auto"
    """Data type of hidden states on the wire: fp32, bf16, fp16, int8 or auto. auto uses fp32
    between fp32 peers, else bf16. int8 halves the traffic of bf16 and is less exact: values are
    rounded to 8 bits with a scale for each group of 64. If a peer of the first route does not
    support int8, auto is used instead."""

    kv_format: str = "float"
    """Format of the KV cache on the peers, unless a session sets its own: float, the format of the
    computation, or int8, in a quarter to a half of the memory. With int8, results are bit for bit
    independent of other sessions only at peers with int8 weights; at others, rounding in the last
    digit may become a difference of 1/127 in the cache."""

    weights: str | None = None
    """Use only peers with this weight format (int8, bf16, fp32); None: any."""

    allowed_servers: tuple[str, ...] | None = None
    """Ids of the peers that may be used; None: all."""

    blocked_servers: tuple[str, ...] = ()
    """Ids of peers that are never used."""

    delivery: str = "chain"
    """Delivery of hidden states between hops: chain, where each peer pushes to the next, or star,
    where all go through this client. A chain needs fewer round trips; a star is used where two
    peers cannot connect."""

    standby: bool = False
    """Keep a hot standby for each hop of a session: another peer that computes the same and takes
    over without replay if the hop is lost. This doubles the swarm's work."""

    connect_timeout_seconds: float = 5.0
    """Time for one peer to accept a connection and open a session."""

    failover_timeout_seconds: float = 20.0
    """Time for which one step may look for peers before it fails with a RouteError that names the
    missing blocks; 0 does not wait."""

    refresh_seconds: float = 10.0
    """Maximum age of the announcements with which a route is planned."""

    max_step_bytes: int = 4 * 2**20
    """Largest size of one piece of a prompt; longer prompts are sent in several."""

    seed: int | None = None
    """Seed of the random choice among equally good peers; None: a random seed."""

    def __post_init__(self) -> None:
        """Raise UsageError that names the setting which cannot be."""
        if not isinstance(self.join, str):
            raise UsageError(f"join must be a join code ('shoal:…'), not {self.join!r}")
        if self.join:
            JoinCode.parse(self.join)
        _check_choice("wire_dtype", self.wire_dtype, ("auto", *(d.name.lower() for d in WireDtype)))
        read_kv_format(self.kv_format)
        _check_choice("delivery", self.delivery, ("chain", "star"))
        if not isinstance(self.standby, bool):
            raise UsageError(f"standby must be True or False, not {self.standby!r}")
        if self.weights is not None:
            _check_choice("weights", self.weights, [known.value for known in WeightFormat])
        if not _is_seconds(self.connect_timeout_seconds) or self.connect_timeout_seconds == 0:
            raise UsageError(
                "connect_timeout_seconds must be a number of seconds above 0, not "
                f"{self.connect_timeout_seconds!r}"
            )
        for name in ("failover_timeout_seconds", "refresh_seconds"):
            if not _is_seconds(getattr(self, name)):
                raise UsageError(
                    f"{name} must be a number of seconds of at least 0, not {getattr(self, name)!r}"
                )
        if make_whole("max_step_bytes", self.max_step_bytes) < 1:
            raise UsageError(f"max_step_bytes must be at least 1, not {self.max_step_bytes}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise UsageError(f"seed must be a whole number or None, not {self.seed!r}")


def _check_choice(name: str, given: object, choices: Sequence[str]) -> None:
    if given not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {given!r}")


def read_kv_format(given: object) -> KVFormat:
    """Return the format of a name; raises UsageError for anything else.

    >>> read_kv_format("int8").name
    'INT8'
    """
    formats = {known.name.lower(): known for known in KVFormat}
    _check_choice("kv_format", given, list(formats))
    return formats[str(given)]


def _is_seconds(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return False
    return math.isfinite(given) and given >= 0


def read_max_length(given: object) -> int:
    """Return the length of a session in tokens; raises UsageError for one that none may have."""
    max_length = make_whole("max_length", given)
    if max_length < 1:
        raise UsageError(f"a session needs a length of at least one token, not {max_length}")
    if max_length > MAX_SESSION_TOKENS:
        raise UsageError(
            f"max_length is at most {MAX_SESSION_TOKENS} tokens, whatever the model, not "
            f"{max_length}"
        )
    return max_length


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
    raise UsageError(f"{name} must be a whole number, not {given!r}")
