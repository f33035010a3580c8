"""What a client knows of one adapter that it has published: for whom, and which peers keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.messages.adapters import KEEP_SECONDS
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterVersion

KeeperError = UnavailableError | RefusedError | RemoteProtocolError
"""What comes of a peer that does not keep an adapter."""


@dataclass(frozen=True)
class Claim:
    """That somebody wants one state of an adapter kept, until there is a later one.

    Claims of one client are numbered in the order in which they were made.
    """

    lineage: str
    span: Span
    number: int

    @property
    def kind(self) -> tuple[str, Span]:
        """What its states have in common that take each other's place."""
        return self.lineage, self.span


@dataclass(frozen=True)
class _Copy:
    """What one peer has of it, or may have; by some time it has forgotten it."""

    until: float
    is_kept: bool
    """Whether the peer said so, and did not fall silent since."""


@dataclass(eq=False)
class Publication:
    """One adapter as it was published, and who keeps it.

    Two adapters that hold the same numbers are one publication. Peers are brought it, and it is
    renewed, as long as it is wanted.
    """

    name: AdapterId
    span: Span
    version: AdapterVersion | None = None
    """None: nobody wants it any more. Peers may have it still."""
    claims: set[Claim] = field(default_factory=set[Claim])
    num_waiting: int = 0
    """How many calls wait for peers to keep it."""
    is_withdrawn: bool = False
    tasks: dict[PeerId, asyncio.Task[KeeperError | None]] = field(
        default_factory=dict[PeerId, "asyncio.Task[KeeperError | None]"]
    )
    """Of each peer, the one that sees to it that the peer keeps it."""
    _copies: dict[PeerId, _Copy] = field(default_factory=dict[PeerId, _Copy])

    @property
    def is_wanted(self) -> bool:
        """Whether peers are to keep it."""
        return bool(self.claims) or self.num_waiting > 0

    @property
    def is_over(self) -> bool:
        """Whether nobody wants it, nobody is brought it, and nobody has it any more."""
        return not (self.is_wanted or self.tasks or self._copies)

    @property
    def holders(self) -> Collection[PeerId]:
        """Who has it, or may have it."""
        return list(self._copies)

    @property
    def num_bytes(self) -> int:
        """How large it is, as long as it is wanted."""
        assert self.version is not None
        cut = self.version.cut(self.span)
        assert cut is not None
        return len(cut.tensors)

    def is_kept_by(self, peer_id: PeerId) -> bool:
        """Return whether a peer has it, as far as is known."""
        copy = self._copies.get(peer_id)
        return copy is not None and copy.is_kept

    def expires_at(self, peer_id: PeerId) -> float:
        """Return when a peer forgets it; 0.0 for one that does not have it."""
        copy = self._copies.get(peer_id)
        return 0.0 if copy is None else copy.until

    def note_kept(self, peer_id: PeerId, keep_seconds: float, now: float) -> None:
        """Note that a peer said that it has the adapter, for so long if it hears nothing more.

        What it said before it was told to forget it comes too late.
        """
        if not self.is_withdrawn:
            until = now + min(keep_seconds, KEEP_SECONDS)
            self._copies[peer_id] = _Copy(until, is_kept=True)

    def note_sent(self, peer_id: PeerId, now: float) -> None:
        """Note that a peer may have the adapter: it got some of it, and did not say what became."""
        self._copies[peer_id] = _Copy(now + KEEP_SECONDS, is_kept=False)

    def note_silent(self, peer_id: PeerId) -> None:
        """Note that a peer said nothing when it was told to keep it: it may have lost it."""
        if copy := self._copies.get(peer_id):
            self._copies[peer_id] = _Copy(copy.until, is_kept=False)

    def note_gone(self, peer_id: PeerId) -> None:
        """Note that a peer does not have it, or that there is nothing more to be done about it."""
        self._copies.pop(peer_id, None)

    def forget_expired(self, now: float) -> None:
        """Forget whoever has forgotten it by now."""
        self._copies = {peer_id: copy for peer_id, copy in self._copies.items() if now < copy.until}
