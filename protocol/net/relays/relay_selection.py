"""Which relays carry streams to a peer that cannot be dialled, from its start to its end.

`circuit.py` makes the reservation at a relay.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress

from ...endpoints import Endpoint, Relay
from ...errors import DirectoryError, ShoalError, UnavailableError
from ...ids import PeerId
from ...records.announcements import Announcement
from ..clock import Clock
from ..retry import Backoff, Backoffs
from ..tcp.dial_rules import DialRules
from .circuit import ANSWER_SECONDS, RelayReservations

log = logging.getLogger(__name__)

NUM_RELAYS = 2
"""Number of relays, so that one may die unnoticed. As many as p2pd keeps connections to."""

_RENEW_SECONDS = 60.0
"""How often a reservation is renewed while the connection lasts. A relay that was restarted
meanwhile has forgotten it, one that was not gives it for an hour."""

_SEARCH_SECONDS = 30.0
"""How often a second relay is looked for while there is one."""

_REST = Backoff(15.0, 3600.0)
"""How long a relay that is gone or refuses is left alone. libp2p, too, waits longer and longer
before it dials an address again."""

_MAX_TRIED = 4
"""How many others are tried at a time; each may take seconds to be silent."""


Search = Callable[[], Awaitable[Iterable[Announcement]]]
"""Reads the directory."""


class RelaySelection:
    """The relays of one peer, with a reservation at each.

    They are found among the initial peers and the peers that announce to be relays, in an order
    that differs from peer to peer: so many peers spread evenly.
    """

    def __init__(
        self,
        reservations: RelayReservations,
        peer_id: PeerId,
        clock: Clock,
        initial: Sequence[Relay],
        rules: DialRules | None,
    ) -> None:
        """Begin with the best ones of `initial`, which may have several addresses, best first.

        Addresses that are only announced are dialled by the `rules`; without them, all are.
        """
        self._rules = rules
        self._reservations = reservations
        self._peer_id = peer_id
        self._clock = clock
        self._initial = initial
        self._ways = _group(initial)
        self._is_directory_lost = False  # told once, though it is asked every few seconds
        self._renewed_at: dict[PeerId, float] = {}
        self._failures = Backoffs[PeerId](_REST, clock)
        self._searched_at = float("-inf")
        self.relays = tuple(rank_relays(peer_id, initial)[:NUM_RELAYS])
        """Best first; those of old while there are no others."""

    def move(self, reservations: RelayReservations) -> None:
        """From now on make reservations through another p2pd; those of before went with it."""
        self._reservations = reservations
        self._renewed_at.clear()

    async def renew(self, search: Search) -> None:
        """Leave relays that are gone and take others."""
        connected = await self._reservations.list_connected()
        kept = [relay for relay in self.relays if await self._holds(relay, connected)]
        is_search_due = self._clock.now() - self._searched_at >= _SEARCH_SECONDS
        if not kept or (len(kept) < NUM_RELAYS and is_search_due):
            self._searched_at = self._clock.now()
            announced = await self._find_announced(search)
            known = {relay.peer_id: self._ways.get(relay.peer_id, [relay]) for relay in kept}
            self._ways = known | _group([*announced, *self._initial])
            # We may have joined through an address that only those in our network can dial.
            names = {relay.peer_id: relay for relay in rank_relays(self._peer_id, announced)}
            kept = [names.get(relay.peer_id, relay) for relay in kept]
            await self._take_others(kept, [*announced, *self._initial])
        if kept:
            self.relays = tuple(kept)

    async def _find_announced(self, search: Search) -> list[Relay]:
        """Return none when the directory cannot be read, which may be for want of a relay."""
        try:
            announced = [relay for peer in await search() for relay in peer.as_relays]
        except DirectoryError as error:
            level = logging.DEBUG if self._is_directory_lost else logging.WARNING
            log.log(level, "could not look up relays in the directory: %s", error)
            self._is_directory_lost = True
            return []
        self._is_directory_lost = False
        return announced

    async def _holds(self, relay: Relay, connected: Collection[PeerId]) -> bool:
        """Return whether a relay still carries to us; a reservation that was lost is made again."""
        age_seconds = self._clock.now() - self._renewed_at.get(relay.peer_id, float("-inf"))
        if relay.peer_id in connected and age_seconds < _RENEW_SECONDS:
            return True
        return await self._reserve(relay)

    async def _take_others(self, kept: list[Relay], candidates: Iterable[Relay]) -> None:
        """Add relays until there are enough, as far as that goes."""
        self._failures.forget_expired()
        held, resting = {relay.peer_id for relay in kept}, self._failures.resting
        ranked = rank_relays(self._peer_id, candidates)
        fresh = [r for r in ranked if r.peer_id not in held and r.peer_id not in resting]
        # Anybody may say that it is a relay, with an id that comes first for us: those that were
        # silent must not keep us from the others.
        fresh.sort(key=lambda relay: self._failures.count_failures(relay.peer_id) > 0)
        for relay in fresh[:_MAX_TRIED]:
            if len(kept) < NUM_RELAYS and await self._reserve(relay):
                kept.append(relay)

    async def _reserve(self, relay: Relay) -> bool:
        try:
            ways = await self._list_ways(relay)
            await self._reservations.reserve(relay, *ways)
        except ShoalError as error:
            log.info("the relay %s granted no reservation: %s", relay, error)
            self._renewed_at.pop(relay.peer_id, None)
            # Our own relays are asked even while they rest. That makes the rest no longer, or a
            # short outage would cost an hour.
            if self._failures.may_try(relay.peer_id):
                self._failures.note_failure(relay.peer_id)
            return False
        self._failures.note_success(relay.peer_id)
        self._renewed_at[relay.peer_id] = self._clock.now()
        return True

    async def _list_ways(self, relay: Relay) -> list[Relay]:
        """Return the addresses to dial a relay at; raises UnavailableError when there are none."""
        ways = {relay, *self._ways.get(relay.peer_id, ())}
        if self._rules is None:
            return list(ways)
        allowed = [way for way in ways if way in self._initial]
        for way in ways.difference(allowed):
            with suppress(UnavailableError):
                place = Endpoint(way.host, way.port)
                found = await self._rules.locate(place, ANSWER_SECONDS / len(ways))
                allowed.append(Relay(found.host, found.port, way.peer_id))
        if not allowed:
            raise UnavailableError(f"{relay} is at no address that this peer may dial")
        return allowed


def _group(relays: Iterable[Relay]) -> dict[PeerId, list[Relay]]:
    """Return the addresses of each of some relays, in their order."""
    ways: dict[PeerId, list[Relay]] = {}
    for relay in relays:
        ways.setdefault(relay.peer_id, []).append(relay)
    return ways


def rank_relays(peer_id: PeerId, relays: Iterable[Relay]) -> list[Relay]:
    """Return relays in the order of one peer, each once: by hashes of both ids.

    Each is known by the first address that is given of it. Which one a peer takes hardly depends on
    which others there are, and each gets an equal part.
    """

    def draw(relay: Relay) -> bytes:
        return hashlib.sha256(f"{peer_id}\0{relay.peer_id}".encode()).digest()

    return sorted((ways[0] for ways in _group(relays).values()), key=draw)
