"""The snapshot of a swarm: who counts, who covers, and what is missing."""

import pytest
from announcements import MODEL, NOW, make_announcement

from shoal.protocol.records.announcements import PeerState
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span


def test_view_tells_who_serves_each_block() -> None:
    first, second = make_announcement(1, span=Span(0, 4)), make_announcement(2, span=Span(3, 6))

    view = SwarmView.from_announcements(MODEL, [first, second], NOW)

    assert view.num_blocks == 8
    assert view.serving(0) == (first,)
    assert set(view.serving(3)) == {first, second}
    assert view.serving(5) == (second,)
    assert view.serving(6) == view.serving(8) == view.serving(-1) == ()
    assert [len(peers) for peers in view.coverage] == [1, 1, 1, 2, 1, 1, 0, 0]
    assert view.gaps == (Span(6, 8),)
    assert view.find(second.peer_id) == second


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.DRAINING, PeerState.OFFLINE])
def test_only_online_peers_cover_but_all_are_visible(state: PeerState) -> None:
    whole = make_announcement(1, span=Span(0, 8), state=state)

    view = SwarmView.from_announcements(MODEL, [whole], NOW)

    assert view.peers == (whole,)
    assert view.online == ()
    assert view.gaps == (Span(0, 8),)
    assert str(state) in repr(view)


def test_expired_announcements_are_left_out() -> None:
    peers = [make_announcement(1), make_announcement(2, issued_at=NOW - 90, expires_at=NOW)]

    assert SwarmView.from_announcements(MODEL, peers, NOW).peers == (make_announcement(1),)


def test_num_blocks_is_what_most_peers_say() -> None:
    honest = [make_announcement(number) for number in (1, 2)]
    liar = make_announcement(3, num_blocks=4000, span=Span(0, 4000))

    view = SwarmView.from_announcements(MODEL, [*honest, liar], NOW)

    assert view.num_blocks == 8
    assert set(view.peers) == set(honest)


def test_num_blocks_from_the_configuration_overrules_peers() -> None:
    honest = make_announcement(1)
    liars = [make_announcement(number, num_blocks=16) for number in (2, 3)]

    view = SwarmView.from_announcements(MODEL, [honest, *liars], NOW, num_blocks=8)

    assert view.peers == (honest,)


def test_empty_view_has_the_gaps_of_its_configuration() -> None:
    view = SwarmView.from_announcements(MODEL, [], NOW)

    assert view.num_blocks == 0
    assert view.gaps == ()
    assert SwarmView.from_announcements(MODEL, [], NOW, num_blocks=4).gaps == (Span(0, 4),)
