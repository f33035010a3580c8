"""The settings of a client, as one frozen value, and the names that PETALS gave to them."""

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...kernels.linear.quantize import WeightFormat
from ...protocol.errors import UsageError
from ...protocol.limits import MAX_SESSION_TOKENS
from ...protocol.membership.join_code import JoinCode
from ...protocol.tensors import KVFormat, WireDtype

_RENAMED_FROM_PETALS = {
    "connect_timeout": "connect_timeout_seconds",
    "update_period": "refresh_seconds",
}

_LAST_FOREVER = "failover_timeout_seconds limits the search for peers"
_IS_MEASURED = "timeouts of peers follow from measured response times"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "ban_timeout": "the quarantine of a peer depends on its failures",
    "daemon_startup_timeout": "no daemon is started",
    "dht_prefix": "the model id is computed from configuration and weights",
    "low_cpu_mem_usage": "weights are always read without a copy",
    "max_backoff": _LAST_FOREVER,
    "max_pinged": _IS_MEASURED,
    "max_retries": _LAST_FOREVER,
    "min_backoff": _LAST_FOREVER,
    "ping_timeout": _IS_MEASURED,
    "request_timeout": _IS_MEASURED,
    "show_route": "read `session.hops` instead",
    "trust_remote_code": "code of a model's repository is never run",
}
"""Settings of PETALS that are accepted without effect, and why."""


_STAR = "use_server_to_server"

PETALS_SETTINGS = frozenset({*_RENAMED_FROM_PETALS, *_WITHOUT_EFFECT, _STAR})
"""All settings of PETALS that are not called the same here."""


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


def is_client_setting(name: str) -> bool:
    """Return whether an argument of from_pretrained() is a setting of clients."""
    return name in PETALS_SETTINGS or name in _list_names()


def check_known(names: Iterable[str]) -> None:
    """Raise UsageError unless all of these are settings of clients."""
    known = _list_names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UsageError(
            f"from_pretrained() does not know {', '.join(unknown)}; client settings are "
            f"{', '.join(known)}"
        )


def _list_names() -> list[str]:
    return sorted(field.name for field in fields(ClientConfig))


def make_client_config(initial_peers: object, options: dict[str, Any]) -> ClientConfig:
    """Return the settings passed to from_pretrained(); raises UsageError for unknown ones.

    Names of PETALS are translated. What is None is not given: a caller may pass on what nobody gave
    it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    options = _translate_settings(given)
    check_known(options)
    addresses = () if initial_peers is None else make_initial_peers(initial_peers)
    if options.get("allowed_servers") is not None:
        options["allowed_servers"] = _read_peer_ids("allowed_servers", options["allowed_servers"])
    options["blocked_servers"] = _read_peer_ids(
        "blocked_servers", options.get("blocked_servers") or ()
    )
    return ClientConfig(initial_peers=addresses, **options)


def _translate_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under our names; warns of those that have no effect here."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            ignored.append(f"{name} ({_WITHOUT_EFFECT[name]})")
        elif name == _STAR:
            found["delivery"] = "chain" if value else "star"
        else:
            found[_RENAMED_FROM_PETALS.get(name, name)] = value
    if ignored:
        warnings.warn(f"settings without effect: {', '.join(ignored)}", stacklevel=2)
    return found


def _read_peer_ids(name: str, given: object) -> tuple[str, ...]:
    """Return ids of peers, which may be texts or objects of hivemind."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{name} must be a list of peer ids (['12D3KooW…']), not {given!r:.80}")
    return tuple(map(str, given))


def make_initial_peers(given: object) -> tuple[str, ...]:
    """Return the addresses that were given: one, or several, as texts or objects of multiaddr.

    >>> make_initial_peers("/ip4/…") == make_initial_peers(["/ip4/…"])
    True
    """
    if _is_address(given):
        return (str(given),)
    if not isinstance(given, Sequence) or not all(map(_is_address, given)):
        raise UsageError(f"initial_peers must be addresses, ['/ip4/…'], not {given!r}")
    return tuple(map(str, given))


def _is_address(given: object) -> bool:
    return isinstance(given, str) or str(given).startswith("/")


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
