"""The configuration of a peer, built once from the command line, and the events it reports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.membership.membership import Membership
from ...protocol.spans import Span
from ..accounts.budgets import LEAST_ADAPTER_BYTES, LEAST_PASS_BYTES
from ..engine.devices.device_names import NO_NF4, parse_cuda_number

WEIGHT_FORMATS = ("int8", "bf16", "fp32", "nf4")
"""How block weights can be held; the last one on CUDA devices only."""


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

    block_cache_bytes: int = 16 * 2**30
    """Disk space for quantized blocks in `~/.cache/shoal/blocks`, for all peers of a user together;
    0: quantize them again at each start."""

    initial_peers: tuple[str, ...] = ()
    """Directory addresses to join through; empty: begin a new swarm."""

    membership: Membership | None = None
    """The swarm to join or begin; None: the public one of the initial peers, or a new one."""

    listen_host: str = "127.0.0.1"
    """Address to accept connections on."""

    listen_port: int = 0
    """Port for sessions; 0: any free one."""

    directory_port: int = 0
    """Port of the directory; 0: any free one."""

    announce_host: str | None = None
    """Host that others dial; None: the one of `listen_host`."""

    identity_path: Path | None = None
    """Key file of the peer; None: a fresh identity that ends with the process."""

    announce_period_seconds: float = 30.0
    """Interval between announcements; an announcement expires after three periods."""

    max_sessions: int = 256
    """Most sessions at the same time."""

    session_idle_seconds: float = 1800.0
    """Time without a step after which a session is closed."""

    drain_seconds: float = 10.0
    """Time that running sessions get to move to other peers after a request to stop."""

    token_budget: int = 512
    """Most tokens (rows times length) in one iteration of the engine."""

    def __post_init__(self) -> None:
        if self.membership is not None:
            self.membership.check_may_serve()
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
