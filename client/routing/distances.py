"""How long it takes to get from one peer to the next, as far as a client knows.

Nobody is believed beyond what can be: whatever peers say of the round trip between two of them, it
is no more than the client's own round trips to both together, and no less than what these differ
by. So who lies about it gains little.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...protocol.ids import PeerId
from ...protocol.records.announcements import Announcement, shorten
from ...protocol.records.coordinates import ORIGIN, SETTLED_ERROR, Coordinate
from ...protocol.versions import CHAIN_VERSION, REVERSE_VERSION

Column = NDArray[Any]
"""A number for each peer."""

Table = NDArray[Any]
"""A number for each peer and each other one."""


class Places(NamedTuple):
    """Where peers say that they are; `heights` are NaN for those that do not know it yet."""

    points: Table
    heights: Column


_read_numbers = attrgetter("x", "y", "z", "height", "error")


def read_places(coordinates: Iterable[Coordinate | None]) -> Places:
    """Return where peers are, a row each."""
    known = (_read_numbers(coordinate or ORIGIN) for coordinate in coordinates)
    table = np.fromiter(chain.from_iterable(known), dtype=float).reshape(-1, 5)
    heights, errors = table[:, 3], table[:, 4]
    return Places(table[:, :3], np.where(errors <= SETTLED_ERROR, heights, np.nan))


def estimate_rtts(own: Coordinate, places: Places) -> Column:
    """Return about how long the round trips from somewhere to peers are; NaN where nobody knows."""
    here = read_places([own])
    differences = places.points - here.points
    apart = np.sqrt(np.einsum("pk,pk->p", differences, differences))
    return apart + places.heights + here.heights


def can_push(peer: Announcement, following: Announcement) -> bool:
    """Return whether a peer may push to another one, by what they announce: it can dial that, or
    holds connections that it has parked there.
    """
    version = min(peer.max_version, following.max_version)
    if following.endpoints:
        return version >= CHAIN_VERSION
    return version >= REVERSE_VERSION and following.is_parked_at(peer.peer_id)


def measure_edges(
    peers: Sequence[Announcement],
    places: Places,
    rtt_seconds: Column,
    is_measured: Column,
    cuts: Collection[tuple[PeerId, PeerId]] = (),
) -> Table:
    """Return the one-way seconds from each peer to each other one.

    `rtt_seconds` are the client's own, to each, some of them measured. What peers have measured
    counts before what their coordinates say. Where one cannot push to the other, and where nobody
    knows how far they are apart, the way leads through the client.
    """
    through_client = rtt_seconds[:, None] + rtt_seconds
    told = _read_told(peers)
    seconds = np.where(np.isnan(told), _estimate_apart(places), told)
    both_measured = is_measured[:, None] & is_measured
    differences = np.where(both_measured, np.abs(rtt_seconds[:, None] - rtt_seconds), 0.0)
    seconds = np.fmin(np.maximum(seconds, differences), through_client)
    seconds = np.where(_find_pushing(peers, cuts), seconds, through_client)
    np.fill_diagonal(seconds, 0.0)
    return 0.5 * seconds


def _read_told(peers: Sequence[Announcement]) -> Table:
    """Return the round trips that peers have measured to each other; NaN for none.

    Of two that differ the longer one counts: to seem near is worth something, to seem far is not.
    """
    rows = {peer.peer_id: row for row, peer in enumerate(peers)}
    told = np.full((len(peers), len(peers)), np.nan)
    for row, peer in enumerate(peers):
        for other, seconds in peer.rtts:
            column = rows.get(other, row)
            if column != row:
                told[row, column] = told[column, row] = np.fmax(told[row, column], seconds)
    return told


def _estimate_apart(places: Places) -> Table:
    """Return the round trips between peers by their coordinates; NaN where one is not settled."""
    points, heights = places
    squares = (points**2).sum(axis=1)
    # |a - b|² as |a|² + |b|² - 2ab: no table with three numbers for each pair.
    apart = squares[:, None] + squares - 2.0 * (points @ points.T)
    return np.sqrt(apart.clip(min=0.0)) + heights[:, None] + heights


def _find_pushing(
    peers: Sequence[Announcement], cuts: Collection[tuple[PeerId, PeerId]]
) -> NDArray[np.bool_]:
    """Return which peers may push to which."""
    speak_chain = np.array([peer.max_version >= CHAIN_VERSION for peer in peers], dtype=bool)
    can_be_dialled = np.array([bool(peer.endpoints) for peer in peers], dtype=bool)
    pushing = speak_chain[:, None] & (speak_chain & can_be_dialled)
    holders = {shorten(peer.peer_id): row for row, peer in enumerate(peers)}
    for column, following in enumerate(peers):
        for row in (holders[ending] for ending in following.parked_at if ending in holders):
            pushing[row, column] = can_push(peers[row], following)
    if cuts:
        rows = {peer.peer_id: row for row, peer in enumerate(peers)}
        for before, after in cuts:
            if before in rows and after in rows:
                pushing[rows[before], rows[after]] = False
    return pushing
