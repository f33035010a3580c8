"""Information about the peers that serve some blocks, with the names of PETALS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span


@dataclass(frozen=True)
class ServerInfo:
    """The announcement of a peer. Speeds are through all of its blocks; None: not measured yet."""

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


def describe_sequence(view: SwarmView, span: Span, block_uids: Sequence[str]) -> RemoteSequenceInfo:
    """Return the peers of a view that serve blocks of a span."""
    parts = [(peer, peer.span.overlap(span)) for peer in view.online]
    spans = [locate(peer, part, span) for peer, part in parts if part is not None]
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


def locate(peer: Announcement, part: Span, sequence: Span) -> RemoteSpanInfo:
    """Return the part of a sequence that a peer serves."""
    start, stop = part.start - sequence.start, part.stop - sequence.start
    return RemoteSpanInfo(peer.peer_id, start, stop, ServerInfo.of(peer))
