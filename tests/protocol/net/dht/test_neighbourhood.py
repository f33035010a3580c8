"""Neighbours that fell silent are looked for, and others are not."""

from __future__ import annotations

from random import Random

import pytest
from announcements import describe_peer

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.net.dht.neighbourhood import (
    LOST_SECONDS,
    MAX_LOST,
    LostNeighbours,
    list_meeting_points,
)
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.spans import Span

PEER_ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def make_peer(
    number: int, state: PeerState = PeerState.ONLINE, directory_port: int = 1
) -> Announcement:
    return describe_peer(
        peer_id=Identity(number.to_bytes(32, "big")).peer_id,
        model_id=ModelId("a" * 32),
        num_blocks=8,
        span=Span(0, 8),
        state=state,
        issued_at=0.0,
        expires_at=90.0,
        endpoints=(Endpoint(f"10.0.{number // 256}.{number % 256}", 4000, "c" * 64),),
        directory_port=directory_port,
    )


def list_lost(neighbours: LostNeighbours) -> set[str]:
    return {address.host for address in neighbours.draw(1000)}


def test_neighbour_that_fell_silent_is_looked_for_until_it_is_back() -> None:
    peers = [make_peer(number) for number in (1, 2, 3)]
    everybody = {peer.peer_id for peer in peers}
    neighbours = LostNeighbours(Random(0))
    neighbours.note(everybody, peers, 0.0)
    assert list_lost(neighbours) == set()

    neighbours.note({peers[0].peer_id}, peers[:1], 30.0)
    assert list_lost(neighbours) == {"10.0.0.2", "10.0.0.3"}
    assert len(neighbours.draw(1)) == 1

    neighbours.note(everybody - {peers[2].peer_id}, peers, 60.0)
    assert list_lost(neighbours) == {"10.0.0.3"}


def test_nobody_is_looked_for_who_never_answered_or_cannot_be_dialled() -> None:
    met, hidden, stranger = make_peer(1), make_peer(2, directory_port=0), make_peer(3)
    neighbours = LostNeighbours(Random(0))

    neighbours.note({met.peer_id, hidden.peer_id}, [met, hidden, stranger], 0.0)
    neighbours.note((), [met, hidden, stranger], 30.0)

    assert list_lost(neighbours) == {"10.0.0.1"}


def test_who_said_goodbye_is_not_looked_for() -> None:
    early, late = make_peer(1), make_peer(2)
    neighbours = LostNeighbours(Random(0))
    neighbours.note({early.peer_id, late.peer_id}, [early, late], 0.0)

    neighbours.note({early.peer_id}, [make_peer(1, PeerState.OFFLINE), late], 30.0)
    neighbours.note((), [make_peer(2, PeerState.OFFLINE)], 60.0)

    assert list_lost(neighbours) == set()


def test_who_is_away_is_forgotten_after_a_day_or_when_there_are_too_many() -> None:
    peers = [make_peer(number) for number in range(1, MAX_LOST + 11)]
    neighbours = LostNeighbours(Random(0))
    neighbours.note({peer.peer_id for peer in peers}, peers, 0.0)

    neighbours.note((), (), 30.0)
    assert len(list_lost(neighbours)) == MAX_LOST
    neighbours.note((), (), 30.0 + LOST_SECONDS)
    assert len(list_lost(neighbours)) == MAX_LOST
    neighbours.note((), (), 31.0 + LOST_SECONDS)
    assert list_lost(neighbours) == set()


@pytest.mark.parametrize("host", ["300.1.1.1", "1.2", "1:2", "fe80::1%eth0"])
def test_relay_whose_host_cannot_be_hides_no_other(host: str) -> None:
    """Announcements may say so: whoever reads the directory would fail with it."""
    peers = [
        describe_peer(
            peer_id=PeerId(PEER_ID),
            model_id=ModelId("a" * 32),
            num_blocks=8,
            span=Span(0, 8),
            issued_at=0.0,
            expires_at=90.0,
            endpoints=(Endpoint(name, 4000, "c" * 64),),
            relay_port=4001,
        )
        for name in (host, "192.0.2.7")
    ]

    assert [relay.host for relay in list_meeting_points(peers)] == ["192.0.2.7"]
