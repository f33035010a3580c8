"""Simulates the loss of peers, and the arrival of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...protocol.records.announcements import Announcement
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from .state import Visibility, WatchedModel, WatchedPeer

ChoosePlace = Callable[[SwarmView, int], Span | None]
"""Returns the span that a newcomer with room for so many blocks would serve: peers' own placement,
which `cli` brings, for it belongs to peers."""


CountRoom = Callable[[int, int], int]
"""Returns for how many blocks of so many bytes a machine with so many free bytes has room, as peers
count it."""


@dataclass(frozen=True)
class Outcome:
    """A model as it would be."""

    model: WatchedModel
    lost: tuple[WatchedPeer, ...]
    """The peers that would be lost."""
    unknown: tuple[str, ...]
    """Ends of ids that no serving peer has."""
    place: Span | None = None
    """Where the newcomer would go; None without one, and where it has nothing to do."""


def imagine_loss(model: WatchedModel, endings: Sequence[str]) -> Outcome:
    """Return the model without the serving peers whose ids end so."""
    lost = [
        peer
        for peer in model.serving
        if any(peer.announcement.peer_id.endswith(ending) for ending in endings)
    ]
    ids = [peer.announcement.peer_id for peer in lost]
    unknown = tuple(
        ending for ending in endings if not any(peer_id.endswith(ending) for peer_id in ids)
    )
    peers = dict(model.peers)
    for peer_id in ids:
        peers[peer_id] = replace(peers[peer_id], visibility=Visibility.LOST)
    return Outcome(replace(model, peers=peers), tuple(lost), unknown)


def imagine_newcomer(
    model: WatchedModel, num_blocks: int, now: float, choose: ChoosePlace
) -> Span | None:
    """Return where a peer with room for so many blocks would go."""
    announced = (_date(peer.announcement, now) for peer in model.serving)
    view = SwarmView(model.model_id, model.num_blocks, now, tuple(announced))
    return choose(view, num_blocks) if model.num_blocks else None


def find_block_bytes(model: WatchedModel) -> int | None:
    """Return what one block takes at most of the peers that say it; None if none does."""
    told = Counter(peer.announcement.block_bytes for peer in model.serving)
    del told[0]
    return min(told, key=lambda num_bytes: (-told[num_bytes], num_bytes), default=None)


def _date(announcement: Announcement, now: float) -> Announcement:
    """Return an announcement as if it were made now: placement leaves late ones out."""
    lifetime_seconds = announcement.expires_at - announcement.issued_at
    return replace(announcement, issued_at=now, expires_at=now + lifetime_seconds)
