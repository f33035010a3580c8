"""Routes: hops, each a peer and the blocks used there, and what is noted of hops that were lost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...protocol.errors import RefusedError, UnavailableError
from ...protocol.ids import PeerId
from ...protocol.net.retry import Retry
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span
from .failures import blames_question, find_loss, is_for_good


@dataclass(frozen=True)
class Hop:
    """A peer and the span used on it."""

    peer: Announcement
    span: Span


@dataclass(frozen=True)
class Route:
    """Hops that cover a span once, in order."""

    hops: tuple[Hop, ...]

    def __str__(self) -> str:
        return " → ".join(f"{hop.peer.peer_id[-6:]}[{hop.span}]" for hop in self.hops)


@dataclass(frozen=True)
class Ends:
    """The ends of a chain: the client (None), or hops of a route of which only a part is planned.

    `before` pushes to the first hop of the chain, and its last hop pushes to `after`.
    """

    before: Announcement | None = None
    after: Announcement | None = None

    @property
    def known(self) -> list[Announcement]:
        """The peers on both sides."""
        return [peer for peer in (self.before, self.after) if peer is not None]


class LostHopError(UnavailableError):
    """A hop has to be replaced. It is hung up on, and its peer blamed; `__cause__` says why."""

    def __init__(self, hop: Hop, detail: str) -> None:
        super().__init__(detail)
        self.hop = hop

    @property
    def what_happened(self) -> str:
        """The reason, as the end of a sentence that begins with the peer's name."""
        return find_loss(self.__cause__)


class Refusals:
    """Peers that declined for good what one hop is asked; they are not asked again."""

    def __init__(self) -> None:
        self._lost: dict[PeerId, tuple[Hop, RefusedError]] = {}

    @property
    def peer_ids(self) -> Collection[PeerId]:
        """The peers that declined."""
        return self._lost.keys()

    @property
    def first(self) -> RefusedError | None:
        """The first refusal, None while there is none."""
        return next((refusal for _, refusal in self._lost.values()), None)

    @property
    def contradicted(self) -> list[Hop]:
        """The hops that said no peer could take it, for when another one did."""
        return [hop for hop, refusal in self._lost.values() if blames_question(refusal)]

    def note(self, lost: LostHopError) -> None:
        """Note a refusal, if the hop was lost by one that is for good."""
        refusal = lost.__cause__
        if isinstance(refusal, RefusedError) and is_for_good(refusal):
            self._lost[lost.hop.peer.peer_id] = lost.hop, refusal


class Trouble:
    """The failures of one step or pass at one place so far: who declined it for good, and how
    long to go on with others.
    """

    def __init__(self, retry: Retry) -> None:
        self.refusals = Refusals()
        self.retry = retry
