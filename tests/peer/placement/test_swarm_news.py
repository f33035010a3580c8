"""What a host hears of its swarm: once when something is lost, and once when it is back."""

from __future__ import annotations

from announcements import MODEL, NOW, identity_of, make_announcement

from shoal.peer.placement.swarm_news import SwarmNews
from shoal.peer.process.config import PeerEvent
from shoal.protocol.endpoints import Relay
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span

OWN = make_announcement(1)
OTHER, THIRD = (make_announcement(number, span=Span(4, 8)) for number in (2, 3))
OFFLINE, JOINING = (
    make_announcement(2, span=Span(4, 8), state=state)
    for state in (PeerState.OFFLINE, PeerState.JOINING)
)


class Host:
    """Hears the news of peer 1."""

    def __init__(self) -> None:
        self._news = SwarmNews(identity_of(1).peer_id)

    def look(self, *others: Announcement) -> list[PeerEvent]:
        return self._news.look(SwarmView.from_announcements(MODEL, [OWN, *others], NOW))

    def hear(self, *others: Announcement) -> list[str]:
        return [event.name for event in self.look(*others)]


def test_gap_is_told_when_it_appears_and_when_it_is_closed() -> None:
    host = Host()

    (gap,) = host.look()

    facts = {"missing": ["4:8"], "can_join": False, "is_lost": False}
    assert (gap.name, gap.facts) == ("gap", facts)
    assert host.hear() == []
    assert host.hear(JOINING) == []  # it may still fail
    assert host.hear(OTHER) == ["gap_closed"]
    assert host.hear(OTHER) == []
    assert host.hear(OFFLINE) == ["gap"]


def test_gap_that_grows_is_told_again_and_one_that_shrinks_is_not() -> None:
    host = Host()
    first, last = (make_announcement(2 + n, span=Span(4 + 2 * n, 6 + 2 * n)) for n in (0, 1))

    assert host.hear(first, last) == []
    assert host.hear(first) == ["gap"]
    (grown,) = [event for event in host.look() if event.name == "gap"]
    assert grown.facts["missing"] == ["4:8"]
    assert "gap" not in host.hear(last)
    assert host.hear(first, last) == ["gap_closed"]


def test_gap_says_whether_anybody_is_left_to_join_through() -> None:
    """Nobody can join through a peer behind relays; this one is announced without a port."""
    node = make_announcement(2, directory_port=4001)

    for others, can_join in (((node,), True), ((make_announcement(2),), False)):
        (gap,) = Host().look(*others)
        assert gap.facts["can_join"] is can_join


def test_blocks_that_somebody_is_about_to_serve_are_no_gap() -> None:
    host = Host()

    assert host.hear(JOINING) == []
    assert host.hear(OTHER) == []


def test_loss_of_all_others_is_told_with_what_it_costs_and_so_is_their_return() -> None:
    host = Host()
    assert host.hear(OTHER, THIRD) == []
    assert host.hear(THIRD) == []

    (lost, gap) = host.look()

    assert (lost.name, lost.facts) == ("lost", {"peers": 1})
    assert (gap.name, gap.facts["is_lost"]) == ("gap", True)  # others may go on unheard
    assert host.hear() == []
    assert host.hear(OTHER) == ["found", "gap_closed"]


def test_peer_that_the_owner_revoked_is_not_lost() -> None:
    news = SwarmNews(identity_of(1).peer_id)
    news.look(SwarmView.from_announcements(MODEL, [OWN, OTHER], NOW))

    alone = SwarmView.from_announcements(MODEL, [OWN], NOW)

    assert "lost" not in [event.name for event in news.look(alone, [OTHER.peer_id])]


def test_others_that_say_goodbye_are_not_lost() -> None:
    host = Host()
    host.look(OTHER)

    assert host.hear(OFFLINE) == ["gap"]
    assert host.hear() == []  # what they said has expired


def test_first_peer_that_is_carried_is_told() -> None:
    host = Host()
    relay = Relay("192.0.2.1", 4001, identity_of(1).peer_id)
    carried, elsewhere = (
        make_announcement(2, span=Span(4, 8), endpoints=(), relays=(where,))
        for where in (relay, Relay("192.0.2.2", 4001, identity_of(3).peer_id))
    )

    assert host.hear(elsewhere) == []
    (relaying,) = host.look(carried)
    assert relaying == PeerEvent("relaying", {"peers": 1})
    assert host.hear(elsewhere) == []
    assert host.hear(carried) == []
