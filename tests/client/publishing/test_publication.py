"""Which peers are to hold the blocks of a publication."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from announcements import describe_peer

from shoal.client.publishing.publication import choose_holders
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span


def make_peer(number: int, start: int, stop: int, num_held: int = 0) -> Announcement:
    peer_id = Identity(bytes([number]) * 32).peer_id
    adapters = tuple(f"{one:016x}" for one in range(num_held))
    return describe_peer(
        peer_id=peer_id,
        model_id=ModelId("a" * 32),
        span=Span(start, stop),
        num_blocks=6,
        endpoints=(Endpoint("192.0.2.1", 4040 + number),),
        issued_at=0.0,
        expires_at=90.0,
        adapters=adapters,
    )


def make_relayed(number: int, start: int, stop: int) -> Announcement:
    peer = make_peer(number, start, stop)
    return replace(peer, endpoints=(), relays=(Relay("192.0.2.1", 1, peer.peer_id),))


def choose(peers: list[Announcement], num_missing: int = 2) -> list[int]:
    chosen = choose_holders(peers, Counter(dict.fromkeys(range(6), num_missing)))
    return [peers.index(peer) for peer in chosen]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 6)] * 4, [0, 1]),
        ([(0, 3), (3, 6)] * 3, [0, 1, 2, 3]),
        ([(0, 2), (0, 6), (2, 6), (4, 6)], [1, 2, 0]),
        ([(0, 3)], [0]),
        ([], []),
    ],
)
def test_each_block_gets_two_holders_where_there_are_two(
    spans: list[tuple[int, int]], expected: list[int]
) -> None:
    assert choose([make_peer(n, *span) for n, span in enumerate(spans)]) == expected


def test_peers_that_can_be_dialled_and_hold_little_come_first() -> None:
    peers = [
        make_relayed(0, 0, 6),
        make_peer(1, 0, 6, 7),
        make_peer(2, 0, 6, 3),
        make_peer(3, 0, 3),
    ]
    assert choose(peers, 1) == [2]
    assert choose(peers) == [2, 1]
    assert choose([peers[0], peers[3]], 1) == [1, 0]


def test_peers_of_blocks_that_are_held_enough_are_not_chosen() -> None:
    peers = [make_peer(0, 0, 3), make_peer(1, 3, 6)]
    chosen = choose_holders(peers, Counter({0: 0, 1: -1, 2: 0, 3: 1}))
    assert chosen == peers[1:]
