"""Which announcements are told to somebody who asks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from announcements import make_announcement, sign

from shoal.client.routing.route_finder import GOSSIP_BYTES
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.records import Records
from shoal.protocol.records.announcement_book import digest_record
from shoal.protocol.records.announcements import (
    Announcement,
    KnownRecord,
    PeerState,
)
from shoal.protocol.records.swarm_records import choose_records, split_digests
from shoal.protocol.spans import Span, find_gaps


def make_known(peer: Announcement, value: bytes) -> KnownRecord:
    return KnownRecord(peer, value, digest_record(value))


def make_records(*spans: tuple[int, int]) -> list[KnownRecord]:
    """Return the records of peers 1, 2, … that serve these spans of 8 blocks."""
    made = [make_announcement(number, span=Span(*span)) for number, span in enumerate(spans, 1)]
    return [make_known(peer, sign(peer, number)) for number, peer in enumerate(made, 1)]


def test_what_is_known_is_not_told_again_but_our_own_record_is_and_comes_first() -> None:
    records = make_records((0, 4), (4, 8), (0, 8))
    known = {records[0].digest, records[2].digest}

    told = choose_records(records[2:], records, known, 2**16, random.Random(0))

    assert told == (records[2].value, records[1].value)


@pytest.mark.parametrize("seed", range(5))
def test_few_records_cover_all_blocks(seed: int) -> None:
    own, *records = make_records((0, 1), *[(0, 2)] * 20, *[(2, 5)] * 20, (5, 8))
    num_bytes = 4 * max(len(one.value) for one in records)

    told = choose_records([own], [own, *records], (), num_bytes, random.Random(seed))

    spans = {one.announcement.span for one in records if one.value in told}
    assert spans == {Span(0, 2), Span(2, 5), Span(5, 8)}


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 4096}, {"state": PeerState.OFFLINE}, {"state": PeerState.JOINING}]
)
def test_peer_that_serves_no_block_of_the_model_covers_none(changes: dict[str, Any]) -> None:
    own, honest = make_records((0, 1), (1, 8))
    others = [make_announcement(number, span=Span(1, 8), **changes) for number in range(3, 40)]
    records = [make_known(peer, sign(peer, number)) for number, peer in enumerate(others, 3)]

    told = choose_records([own], [own, *records, honest], (), 2000, random.Random(1))

    assert told[:2] == (own.value, honest.value)


def test_everything_is_told_where_it_fits_and_never_more_than_fits() -> None:
    records = make_records(*[(0, 4)] * 9, *[(6, 8)] * 3)
    num_bytes = sum(len(one.value) for one in records)

    everything = choose_records((), records, (), num_bytes, random.Random(1))
    less = choose_records((), records, (), num_bytes - 1, random.Random(1))

    assert sorted(everything) == sorted(one.value for one in records)
    assert len(less) == len(records) - 1
    assert choose_records((), (), (), 100, random.Random(1)) == ()


def test_two_askers_are_told_other_peers() -> None:
    records = make_records(*[(0, 8)] * 20)
    rng = random.Random(2)

    first, second = (set(choose_records((), records, (), 2000, rng)) for _ in range(2))

    assert first != second


def test_digests_are_split_as_they_were_joined() -> None:
    digests = [one.digest for one in make_records((0, 4), (4, 8))]

    assert split_digests(b"".join(digests)) == set(digests)


def test_idle_client_of_a_thousand_peers_soon_knows_every_block() -> None:
    """It asks nine times while an announcement holds, each time for an answer of 5 KiB."""
    own = make_known(make_announcement(1, num_blocks=80, span=Span(0, 1)), b"own")
    made = [
        make_announcement(2, num_blocks=80, span=Span(start, start + 4))
        for start in range(0, 80, 4)
    ]
    records = [
        make_known(made[number % 20], number.to_bytes(2) + bytes(398)) for number in range(1000)
    ]
    rng = random.Random(3)

    answers = [choose_records([own], [own, *records], (), GOSSIP_BYTES, rng) for _ in range(9)]

    told = {value for answer in answers for value in answer}
    assert find_gaps(80, [one.announcement.span for one in records if one.value in told]) == []
    frames = [encode_frame(Records(SessionId(bytes(range(16))), answer)) for answer in answers]
    assert max(map(len, frames)) <= GOSSIP_BYTES + 200
