"""What a client takes its own line to carry."""

import pytest

from shoal.client.routing.line import Line

LARGE = 2**20


def guess_seconds(line: Line, num_bytes: int = LARGE) -> float:
    with line.carry(num_bytes) as seconds:
        return seconds


def test_answers_tell_how_fast_the_line_is_at_least() -> None:
    line = Line()
    line.note_answer(LARGE, 10.0)  # the peer may have been slow, and not the line
    line.note_answer(LARGE, 2.0)
    line.note_answer(LARGE, 5.0)

    assert guess_seconds(line) == pytest.approx(2.0)


def test_small_answers_say_nothing() -> None:
    line = Line()
    before = guess_seconds(line)

    line.note_answer(100, 1e-6)
    line.note_silence(100)

    assert guess_seconds(line) == before


def test_old_answers_are_forgotten() -> None:
    line = Line()
    line.note_answer(LARGE, 0.001)
    for _ in range(100):
        line.note_answer(LARGE, 4.0)

    assert guess_seconds(line) == pytest.approx(4.0)


def test_steps_under_way_share_the_line() -> None:
    line = Line()
    alone = guess_seconds(line)

    with line.carry(3 * LARGE):
        assert guess_seconds(line) == pytest.approx(4 * alone)
    assert guess_seconds(line) == alone


def test_silence_makes_an_unknown_line_look_slower_within_reason_and_a_known_one_not() -> None:
    line = Line()
    before = guess_seconds(line)

    line.note_silence(LARGE)
    assert guess_seconds(line) == 2 * before
    for _ in range(100):
        line.note_silence(LARGE)
    assert guess_seconds(line) < 100
    line.note_answer(LARGE, 1.0)
    line.note_silence(LARGE)
    assert guess_seconds(line) == pytest.approx(1.0)
