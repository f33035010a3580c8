"""What a client takes its own line to carry."""

import pytest
from hand_clock import HandClock

from shoal.client.routing.peer_book import Bandwidth, PeerLinks
from shoal.protocol.ids import PeerId

LARGE = 2**20


def guess_seconds(line: Bandwidth, num_bytes: int = LARGE) -> float:
    with line.carry(num_bytes) as seconds:
        return seconds


def test_answers_tell_how_fast_the_line_is_at_least() -> None:
    line = Bandwidth()
    line.note_answer(LARGE, 10.0)  # the peer may have been slow, and not the line
    line.note_answer(LARGE, 2.0)
    line.note_answer(LARGE, 5.0)

    assert guess_seconds(line) == pytest.approx(2.0)


def test_small_answers_say_nothing() -> None:
    line = Bandwidth()
    before = guess_seconds(line)

    line.note_answer(100, 1e-6)
    line.note_silence(100)

    assert guess_seconds(line) == before


def test_old_answers_are_forgotten() -> None:
    line = Bandwidth()
    line.note_answer(LARGE, 0.001)
    for _ in range(100):
        line.note_answer(LARGE, 4.0)

    assert guess_seconds(line) == pytest.approx(4.0)


def test_steps_under_way_share_the_line() -> None:
    line = Bandwidth()
    alone = guess_seconds(line)

    with line.carry(3 * LARGE):
        assert guess_seconds(line) == pytest.approx(4 * alone)
    assert guess_seconds(line) == alone


def test_silence_makes_an_unknown_line_look_slower_within_reason_and_a_known_one_not() -> None:
    line = Bandwidth()
    before = guess_seconds(line)

    line.note_silence(LARGE)
    assert guess_seconds(line) == 2 * before
    for _ in range(100):
        line.note_silence(LARGE)
    assert guess_seconds(line) < 100
    line.note_answer(LARGE, 1.0)
    line.note_silence(LARGE)
    assert guess_seconds(line) == pytest.approx(1.0)


def test_link_that_works_again_is_left_alone_as_briefly_as_the_first_time() -> None:
    clock = HandClock()
    links = PeerLinks(clock)
    first, second = PeerId("a"), PeerId("b")
    links.note_broken(first, second)
    clock.seconds += 31.0
    links.note_answer([first, second], 1000, 0.1)

    links.note_broken(first, second)

    clock.seconds += 31.0
    assert links.broken == frozenset()


def test_failure_that_many_sessions_tell_of_counts_once() -> None:
    clock = HandClock()
    links = PeerLinks(clock)
    for _ in range(5):
        links.note_broken(PeerId("a"), PeerId("b"))

    assert links.broken == {(PeerId("a"), PeerId("b"))}
    clock.seconds += 31.0
    assert links.broken == frozenset()


def test_bytes_take_their_time_on_every_link_that_they_pass() -> None:
    links = PeerLinks(HandClock())
    peer_ids = [PeerId(name) for name in "abc"]
    links.note_answer(peer_ids[:2], 2**20, 1.0)
    links.note_answer(peer_ids[1:], 2**20, 4.0)

    with links.carry(peer_ids, 2**20) as seconds, links.carry(peer_ids[:2], 2**20) as behind:
        assert seconds == pytest.approx(1.0 + 4.0)
        assert behind == pytest.approx(2.0)
    with links.carry(peer_ids[:1], 2**20) as seconds:
        assert seconds == 0.0


def test_link_that_failed_is_given_longer_for_what_it_carries() -> None:
    links = PeerLinks(HandClock())
    peer_ids = [PeerId(name) for name in "ab"]
    with links.carry(peer_ids, 2**20) as before:
        links.note_broken(*peer_ids)
    with links.carry(peer_ids, 2**20) as after:
        assert after == 2 * before


def test_links_of_peers_that_left_are_forgotten() -> None:
    links = PeerLinks(HandClock())
    links.note_broken(PeerId("a"), PeerId("b"))
    links.note_broken(PeerId("c"), PeerId("d"))

    links.forget([PeerId("b")])

    assert links.broken == {(PeerId("c"), PeerId("d"))}
