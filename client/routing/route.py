"""Routes: hops, each a peer and the blocks used there. Values only."""

from dataclasses import dataclass

from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span


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
    """Who pushes to the first hop of a chain, and to whom the last one does: the client (None), or
    hops of a route of which only a part is planned.
    """

    before: Announcement | None = None
    after: Announcement | None = None

    @property
    def known(self) -> list[Announcement]:
        """The peers on both sides."""
        return [peer for peer in (self.before, self.after) if peer is not None]
