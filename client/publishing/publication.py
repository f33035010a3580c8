"""The record of one published adapter at its publisher, and the choice of its holders."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import AdapterId, PeerId
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span, find_gaps
from ...protocol.versions import PUBLISH_VERSION
from ..adapters.adapter_versions import AdapterLeaves
from ..routing.route import Hop

NUM_HOLDERS = 2
"""Peers that hold each block of a publication: one may be lost. All others fetch from these."""

HolderError = UnavailableError | RefusedError | RemoteProtocolError
"""Why a peer does not hold an adapter."""


@dataclass(frozen=True)
class Claim:
    """One call of `publish`: it wants a state of an adapter held until there is a later one.

    Claims of one client are numbered in the order of the calls.
    """

    lineage: str
    span: Span
    number: int

    def replaces(self, other: Claim) -> bool:
        """Return whether this is for a later state of the same adapter."""
        is_same = (self.lineage, self.span) == (other.lineage, other.span)
        return is_same and self.number > other.number


@dataclass(frozen=True)
class Holding:
    """The leaves that one peer holds, or may hold: those of its blocks."""

    span: Span
    renewed_at: float
    until: float
    is_sure: bool = True
    """Whether the peer said so, and has answered since."""


@dataclass
class HolderUpload:
    """One push of the adapter that is under way, or waits for its turn."""

    span: Span
    task: asyncio.Task[None]
    until: float = math.inf
    """When it takes too long to count on."""


@dataclass(eq=False)
class Publication:
    """One published adapter. Two adapters with equal weights are one publication.

    Peers are to hold it as long as there are claims.
    """

    name: AdapterId
    leaves: AdapterLeaves | None = None
    """None: nobody wants it any more."""
    claims: set[Claim] = field(default_factory=set[Claim])
    holders: dict[PeerId, Holding] = field(default_factory=dict[PeerId, Holding])
    uploads: dict[PeerId, HolderUpload] = field(default_factory=dict[PeerId, HolderUpload])
    renewing: asyncio.Task[None] | None = None
    missing: list[Span] | None = None
    """The blocks without a holder, as they were told last; None before a call has ended."""
    error: HolderError | None = None
    """Why the last peer that declined or failed does not hold it."""
    error_text: str = "no peer that could hold it serves them"

    def note(self, peer_id: PeerId, holding: Holding | None) -> None:
        """Note what a peer holds by now; None: nothing."""
        if holding is None:
            self.holders.pop(peer_id, None)
        else:
            self.holders[peer_id] = holding

    def want(self, leaves: AdapterLeaves, claim: Claim) -> None:
        """Have it held from now on."""
        self.leaves = leaves
        self.claims.add(claim)

    def forget_upload(self, peer_id: PeerId, _: object) -> None:
        """Note that an upload has ended."""
        del self.uploads[peer_id]

    def note_error(self, peer: Announcement, error: HolderError) -> None:
        """Note why a peer does not hold it."""
        self.error = error
        is_named = isinstance(error, RefusedError)
        self.error_text = str(error) if is_named else f"{Hop(peer, peer.span).name}: {error}"

    def list_missing(self) -> list[Span]:
        """Return the blocks of the adapter that no peer holds for sure."""
        if self.leaves is None:
            return []
        blocks = self.leaves.manifest.blocks
        held = [holding.span for holding in self.holders.values() if holding.is_sure]
        gaps = find_gaps(max(blocks) + 1, held)
        return [gap for gap in gaps if any(block in gap for block in blocks)]

    def choose_holders(self, peers: Iterable[Announcement], now: float) -> list[Announcement]:
        """Return which of some peers to push to next, so that each block has enough holders.

        Uploads that do not take too long count as holders to come.
        """
        if self.leaves is None:
            return []
        coming = [one.span for one in self.uploads.values() if now < one.until]
        held = [one.span for one in self.holders.values() if one.is_sure] + coming
        missing = Counter(
            {
                block: NUM_HOLDERS - sum(block in span for span in held)
                for block in self.leaves.manifest.blocks
            }
        )
        sure = {peer_id for peer_id, holding in self.holders.items() if holding.is_sure}
        taken = sure | self.uploads.keys()
        return choose_holders([peer for peer in peers if peer.peer_id not in taken], missing)


def can_hold(peer: Announcement) -> bool:
    """Return whether a peer understands publications."""
    return peer.max_version >= PUBLISH_VERSION


def choose_holders(peers: Sequence[Announcement], missing: Counter[int]) -> list[Announcement]:
    """Return peers that together serve each block as often as it is missing, if there are some.

    Others have to reach a holder: so peers that can be dialled come first, then those that serve
    more of the blocks, and of equal ones those that hold less already.
    """
    chosen: list[Announcement] = []
    rest = list(peers)
    while rest:
        num_useful = {
            peer.peer_id: sum(missing[block] > 0 for block in missing if block in peer.span)
            for peer in rest
        }
        rest = [peer for peer in rest if num_useful[peer.peer_id]]
        if not rest:
            break
        best = max(
            rest,
            key=lambda peer: (
                bool(peer.endpoints), num_useful[peer.peer_id], -len(peer.adapters)
            ),
        )  # fmt: skip
        rest.remove(best)
        chosen.append(best)
        missing.subtract(block for block in list(missing) if block in best.span)
    return chosen
