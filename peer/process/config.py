"""The configuration of a peer, built once from the command line, and the events it reports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.limits import MAX_ANNOUNCEMENTS_PER_MODEL, MAX_PEER_NAME_CHARACTERS
from ...protocol.spans import Span
from ..engine.devices.device_names import NO_NF4, parse_cuda_number

WEIGHT_FORMATS = ("int8", "bf16", "fp32", "nf4")
"""How block weights can be held; the last one on CUDA devices only."""

MOST_PASS_BYTES = 2**32
"""For passes. More only helps clients that send microbatches of more than 10,000 tokens."""

LEAST_PASS_BYTES = 2**27
"""With less, no pass through a model of some width finds room."""

MOST_ADAPTER_BYTES = 2**29
"""Of all adapters together, as they were brought. One client may have half of that and a bit."""

LEAST_ADAPTER_BYTES = 2**24
"""With less, there is no room for an adapter of a model of some width."""

ANNOUNCEMENT_BYTES = 2 * MAX_ANNOUNCEMENTS_PER_MODEL * 10 * 2**10
"""Of what others announce: of the model that is served, and as many of all others. An honest one
takes 2.5 KB, the largest that a stranger can make 9 KB."""

MOST_SESSIONS = 256
"""Of a peer. More streams than theirs would be more than its listener takes."""


@dataclass(frozen=True)
class PeerConfig:
    """Settings of one serving peer; the defaults are the only ones there are."""

    model: str
    """Directory of the model, or its id on the Hub."""

    span: Span | None = None
    """Blocks to serve; None: those that the swarm needs most."""

    num_blocks: int | None = None
    """Number of blocks to serve if no span is given; None: as many as free memory holds."""

    weights: str = "int8"
    """Format of the block weights in memory: one of WEIGHT_FORMATS."""

    device: str = "cpu"
    """The device that computes the blocks: cpu, cuda, cuda:N, or auto for cuda where usable."""

    num_threads: int | None = None
    """Threads of one matrix product; None: as many as torch chooses."""

    kv_budget_bytes: int = 2**30
    """Memory for the KV caches of all sessions together."""

    pass_bytes: int | None = None
    """Memory for fine-tuning passes of all clients together; 0: accept none; None: an eighth of
    free memory, 4 GiB at most."""

    adapter_bytes: int | None = None
    """Memory for adapters uploaded by all clients together; 0: accept none; None: a sixteenth of
    free memory, 512 MiB at most."""

    run_bytes: int = 0
    """Memory that is left to a training run in which the peer takes part as well."""

    block_cache_bytes: int = 16 * 2**30
    """Disk space for quantized blocks in `~/.cache/shoal/blocks`, for all peers of a user together;
    0: quantize them again at each start."""

    identity_path: Path | None = None
    """Key file of the peer; None: a fresh identity that ends with the process."""

    name: str = ""
    """What others see as the name of the peer; empty: nothing."""

    announce_period_seconds: float = 30.0
    """Interval between announcements; an announcement expires after three periods."""

    max_sessions: int = MOST_SESSIONS
    """Most sessions at the same time."""

    session_idle_seconds: float = 1800.0
    """Time without a step after which a session is closed."""

    drain_seconds: float = 10.0
    """Time that running sessions get to move to other peers after a request to stop."""

    def __post_init__(self) -> None:
        if len(self.name) > MAX_PEER_NAME_CHARACTERS or not self.name.isprintable():
            raise UsageError(
                f"the name of a peer has at most {MAX_PEER_NAME_CHARACTERS} characters, without "
                "control characters"
            )
        if not 1 <= self.max_sessions <= MOST_SESSIONS:
            raise UsageError(
                f"a peer may have 1 to {MOST_SESSIONS} sessions, not {self.max_sessions}"
            )
        if self.weights not in WEIGHT_FORMATS:
            raise UsageError(
                f"weights must be one of {', '.join(WEIGHT_FORMATS)}, not {self.weights}"
            )
        if parse_cuda_number(self.device) is None and self.weights == "nf4":
            raise UsageError(NO_NF4)
        if self.pass_bytes and self.pass_bytes < LEAST_PASS_BYTES:
            raise UsageError(
                f"training needs at least {LEAST_PASS_BYTES // 2**20} MiB of memory, or none "
                f"(--training-memory 0), not {self.pass_bytes:,} bytes"
            )
        if self.adapter_bytes and self.adapter_bytes < LEAST_ADAPTER_BYTES:
            raise UsageError(
                f"adapters need at least {LEAST_ADAPTER_BYTES // 2**20} MiB of memory, or none "
                f"(--adapter-memory 0), not {self.adapter_bytes:,} bytes"
            )


@dataclass(frozen=True)
class PeerEvent:
    """A point in the life of a peer, for the program that runs it. Values are plain JSON types."""

    name: str
    facts: dict[str, object] = field(default_factory=dict)


Report = Callable[[PeerEvent], None]


def ignore(event: PeerEvent) -> None:
    """Report to nobody."""


def choose_pass_bytes(free_bytes: int) -> int:
    """Return what passes may take of so much free memory, unless a volunteer says it.

    >>> choose_pass_bytes(2**33) // 2**20
    1024
    """
    return min(free_bytes // 8, MOST_PASS_BYTES)


def choose_adapter_bytes(free_bytes: int) -> int:
    """Return what adapters may take of so much free memory, unless a volunteer says it.

    Nothing where that is less than the least that one may say.

    >>> choose_adapter_bytes(2**32) // 2**20
    256
    >>> choose_adapter_bytes(2**27)
    0
    """
    num_bytes = min(free_bytes // 16, MOST_ADAPTER_BYTES)
    return num_bytes if num_bytes >= LEAST_ADAPTER_BYTES else 0


class Waits:
    """Reports what a peer waits for: once for each wait, and not for each attempt."""

    def __init__(self, report: Report) -> None:
        self.what: str | None = None
        """What is waited for now; None: nothing."""
        self._report = report

    def note(self, what: str | None) -> None:
        """Note what is waited for now; None: nothing."""
        if what is not None and what != self.what:
            self._report(PeerEvent("waiting_for", {"what": what}))
        self.what = what
