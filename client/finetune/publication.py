"""What a client knows of one adapter that it has published: who keeps it, and for whom it is so."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.announcements import Announcement
from ...protocol.ids import AdapterId, PeerId
from ...protocol.spans import Span
from .adapter_versions import AdapterVersion

KEEP_SECONDS = 300.0
"""How long a peer keeps what it was not told of again. Who said nothing for so long has it no more,
whatever it says of that itself."""


@dataclass(eq=False)
class Publication:
    """One adapter as it was published, and who keeps it.

    Two adapters that hold the same numbers are one publication. It is renewed as long as it is the
    newest state of one of them: as long as there are `lineages`.
    """

    name: AdapterId
    version: AdapterVersion
    span: Span
    lineages: set[str] = field(default_factory=set[str])
    under_way: set[PeerId] = field(default_factory=set[PeerId])
    """To whom it is being brought now."""
    _keepers: dict[PeerId, tuple[Announcement, float]] = field(
        default_factory=dict[PeerId, tuple[Announcement, float]]
    )
    """With the time when they said so last."""

    @property
    def keepers(self) -> list[Announcement]:
        """Who has it, as far as is known."""
        return [peer for peer, _ in self._keepers.values()]

    def is_kept_by(self, peer_id: PeerId) -> bool:
        """Return whether a peer has it, as far as is known."""
        return peer_id in self._keepers

    def note_kept(self, peer: Announcement, now: float) -> None:
        """Note that a peer said that it has the adapter."""
        self._keepers[peer.peer_id] = peer, now

    def forget_expired(self, now: float) -> None:
        """Forget whoever has forgotten it by now."""
        self._keepers = {
            peer_id: (peer, heard_at)
            for peer_id, (peer, heard_at) in self._keepers.items()
            if now < heard_at + KEEP_SECONDS
        }
