"""A read-only view of the peers that serve some blocks, with the names of PETALS.

The client chooses routes by its own measurements; nothing here changes that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.errors import UsageError
from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..runtime.client import Client
from .distributed_config import DistributedConfig

UID_DELIMITER = "."
"""Separates the name of a model from the index of a block."""

MODES = ("min_latency", "max_throughput")


@dataclass(frozen=True)
class ServerInfo:
    """What a peer has announced. Speeds are through all of its blocks; None: not measured yet."""

    state: PeerState
    start_block: int
    end_block: int
    throughput: float | None
    """Tokens per second for one session under the present load."""
    inference_rps: float | None
    """Tokens per second for a session alone."""
    forward_rps: float | None
    """Tokens per second of prompts."""
    version: str
    torch_dtype: str
    quant_type: str
    using_relay: bool
    cache_tokens_left: int

    @classmethod
    def of(cls, peer: Announcement) -> ServerInfo:
        """Return the contents of an announcement."""
        return cls(
            peer.state,
            peer.span.start,
            peer.span.stop,
            peer.loaded_decode_steps_per_second or peer.decode_steps_per_second,
            peer.decode_steps_per_second,
            peer.prefill_tokens_per_second,
            peer.software,
            peer.compute_dtype,
            peer.weights,
            bool(peer.relays),
            peer.free_kv_tokens,
        )


@dataclass(frozen=True)
class RemoteModuleInfo:
    """A block and the peers that serve it."""

    uid: str
    servers: Mapping[PeerId, ServerInfo]


@dataclass(frozen=True)
class RemoteSpanInfo:
    """A peer and the blocks that it serves, counted from the first block of the sequence."""

    peer_id: PeerId
    start: int
    end: int
    server_info: ServerInfo

    @property
    def length(self) -> int:
        """Number of blocks."""
        return self.end - self.start

    @property
    def state(self) -> PeerState:
        """Whether the peer accepts new sessions."""
        return self.server_info.state

    @property
    def throughput(self) -> float | None:
        """See `ServerInfo.throughput`."""
        return self.server_info.throughput


@dataclass(frozen=True)
class RemoteSequenceInfo:
    """The peers that serve the blocks of a sequence."""

    block_uids: Sequence[str]
    block_infos: Sequence[RemoteModuleInfo]
    spans_by_priority: Sequence[RemoteSpanInfo]
    """Peers with the most of the blocks first."""
    spans_containing_block: Sequence[Sequence[RemoteSpanInfo]]
    last_updated_time: float
    """Wall seconds."""

    def __len__(self) -> int:
        return len(self.block_uids)


@dataclass
class SequenceManagerState:
    """The newest known state. Set `rpc_info` to None to have it read again."""

    sequence_info: RemoteSequenceInfo
    banned_peers: frozenset[PeerId]
    rpc_info: dict[str, Any] | None = None


class RemoteSequenceManager:
    """The peers that serve consecutive blocks. Created from blocks, or to create them.

    Shut it down if you created it, or close the blocks made from it.
    """

    def __init__(
        self, config: DistributedConfig, block_uids: Sequence[str], *, dht: object = None
    ) -> None:
        """Join a swarm for the blocks in `block_uids`.

        `dht` has no effect: the client has a directory of its own, found through
        `config.initial_peers`. Raises UsageError unless the blocks exist and are consecutive.
        """
        span = _read_uids(block_uids, config)
        self._set_up(config.join(), span, config)

    @classmethod
    def over(cls, client: Client, span: Span, config: Any) -> RemoteSequenceManager:
        """Return one for blocks over a client that the caller closes."""
        manager = cls.__new__(cls)
        manager._set_up(client, span, config)
        return manager

    def _set_up(self, client: Client, span: Span, config: Any) -> None:
        self.config = config
        self.client = client
        self.span = span

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int | slice) -> RemoteSequenceManager:
        """Return the same for fewer blocks; raises what `take_blocks` does."""
        return self.over(self.client, take_blocks(self.span, index), self.config)

    @property
    def block_uids(self) -> tuple[str, ...]:
        """The names of the blocks."""
        prefix = self.client.view.model_id + UID_DELIMITER
        return tuple(f"{prefix}{block}" for block in range(self.span.start, self.span.stop))

    @property
    def state(self) -> SequenceManagerState:
        """The newest known state; sends no request."""
        sequence_info = _describe(self.client.view, self.span, self.block_uids)
        return SequenceManagerState(sequence_info, self.client.avoided_peers)

    @property
    def rpc_info(self) -> dict[str, Any]:
        """What a peer that serves the first block says now; raises RouteError without one."""
        first = Span(self.span.start, self.span.start + 1)
        peer = self.client.plan_route(first).hops[0].peer
        return {
            "peer_id": peer.peer_id,
            "version": peer.software,
            "cache_tokens_available": peer.free_kv_tokens,
            "inference_rps": peer.decode_steps_per_second,
            "torch_dtype": peer.compute_dtype,
            "quant_type": peer.weights,
        }

    def make_sequence(
        self,
        start_index: int = 0,
        end_index: int | None = None,
        *,
        mode: str = "min_latency",
        cache_tokens_needed: int | None = None,
    ) -> list[RemoteSpanInfo]:
        """Return a route that a session might take now; raises RouteError with missing blocks.

        Passes of fine-tuning ("max_throughput") have no fixed route: each hop is chosen when it is
        needed. This returns one of many.
        """
        if mode not in MODES:
            raise UsageError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
        if start_index == (len(self) if end_index is None else end_index):
            return []
        span = take_blocks(self.span, slice(start_index, end_index))
        route = self.client.plan_route(span, float(cache_tokens_needed or 0))
        return [_locate(hop.peer, hop.span, self.span) for hop in route.hops]

    def update(self, *, wait: bool = True) -> None:
        """Read the directory now; the client also reads it before each route."""
        self.client.view_swarm()

    def is_alive(self) -> bool:
        """Return whether the client is still in the swarm."""
        return not self.client.is_closed

    def shutdown(self) -> None:
        """Leave the swarm; blocks and models that share the client become unusable."""
        self.client.close()


def take_blocks(span: Span, index: int | slice) -> Span:
    """Return one block of a span, or several consecutive ones, counted from its first.

    Raises IndexError outside of the span and UsageError for an empty slice or one with a step.

    >>> take_blocks(Span(2, 6), slice(1, -1)), take_blocks(Span(2, 6), -1)
    (Span(start=3, stop=5), Span(start=5, stop=6))
    """
    blocks = range(span.start, span.stop)[index]
    if isinstance(blocks, int):
        return Span(blocks, blocks + 1)
    if not blocks or blocks.step != 1:
        raise UsageError(f"a slice must take blocks in a row, [{index}] takes {blocks}")
    return Span(blocks.start, blocks.stop)


def _read_uids(block_uids: Sequence[str], config: DistributedConfig) -> Span:
    prefix = config.dht_prefix + UID_DELIMITER
    names = {f"{prefix}{block}": block for block in range(config.num_hidden_layers)}
    blocks = [names.get(uid) for uid in block_uids]
    start = blocks[0] if blocks else None
    if start is None or blocks != list(range(start, start + len(blocks))):
        raise UsageError(
            f"block_uids name blocks in a row, as f'{{config.dht_prefix}}{UID_DELIMITER}{{index}}' "
            f"with an index below {config.num_hidden_layers}; got {list(block_uids)!r:.200}"
        )
    return Span(start, start + len(blocks))


def _describe(view: SwarmView, span: Span, block_uids: Sequence[str]) -> RemoteSequenceInfo:
    """Return who of a view serves blocks of a span."""
    parts = [(peer, peer.span.overlap(span)) for peer in view.online]
    spans = [_locate(peer, part, span) for peer, part in parts if part is not None]
    by_block = [[one for one in spans if one.start <= i < one.end] for i in range(len(span))]
    return RemoteSequenceInfo(
        block_uids,
        [
            RemoteModuleInfo(uid, {one.peer_id: one.server_info for one in serving})
            for uid, serving in zip(block_uids, by_block, strict=True)
        ],
        sorted(spans, key=lambda one: (-one.length, one.start)),
        by_block,
        view.taken_at,
    )


def _locate(peer: Announcement, part: Span, sequence: Span) -> RemoteSpanInfo:
    start, stop = part.start - sequence.start, part.stop - sequence.start
    return RemoteSpanInfo(peer.peer_id, start, stop, ServerInfo.of(peer))
