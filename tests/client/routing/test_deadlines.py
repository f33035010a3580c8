"""How long a client waits for an answer."""

from typing import Any

import pytest
from announcements import make_announcement

from shoal.client.routing.peer_book import FLOOR_SECONDS, AnswerTimes
from shoal.client.session.hops import choose_open_timeout_seconds
from shoal.protocol.records.announcements import Announcement


def announce(
    decode_seconds: float | None = None, per_token: float | None = None, queue: float = 0.0
) -> Announcement:
    """Return an announcement of these times for one token, alone and in a prompt."""
    speeds: dict[str, Any] = {
        "decode_steps_per_second": decode_seconds and 1 / decode_seconds,
        "prefill_tokens_per_second": per_token and 1 / per_token,
    }
    return make_announcement(queue_seconds=queue, **speeds)


SILENT, SLOW = announce(), announce(1e9, 1e9)
UNKNOWN = AnswerTimes().choose_timeout_seconds(1, SILENT)


def make_times(*answers: tuple[int, float]) -> AnswerTimes:
    times = AnswerTimes()
    for num_tokens, seconds in answers:
        times.note(num_tokens, seconds)
    return times


def test_nothing_known_gives_a_fixed_patience() -> None:
    assert UNKNOWN > FLOOR_SECONDS
    assert AnswerTimes().choose_timeout_seconds(500, SILENT) == UNKNOWN


def test_announced_speed_counts_until_something_was_measured() -> None:
    announced = AnswerTimes().choose_timeout_seconds(1, announce(0.2, 0.01))

    assert announced > AnswerTimes().choose_timeout_seconds(1, announce(0.1, 0.01)) > FLOOR_SECONDS
    assert make_times((1, 2.0)).choose_timeout_seconds(1, announce(0.2, 0.01)) > announced
    assert make_times((1, 0.001)).choose_timeout_seconds(1, announce(0.2, 0.01)) < announced


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_deadline_grows_with_measured_times(num_tokens: int) -> None:
    timeouts = [
        make_times((1, seconds), (100, 100 * seconds)).choose_timeout_seconds(num_tokens, SILENT)
        for seconds in (0.001, 0.01, 0.1, 1.0)
    ]

    assert timeouts == sorted(set(timeouts))
    assert all(
        timeout >= FLOOR_SECONDS + 2 * num_tokens * seconds
        for timeout, seconds in zip(timeouts, (0.001, 0.01, 0.1, 1.0), strict=True)
    )


def test_worst_recent_answer_counts_and_old_ones_are_forgotten() -> None:
    times = make_times((1, 5.0), (1, 0.1))
    slow = times.choose_timeout_seconds(1, SILENT)

    assert slow > 5.0
    for _ in range(1000):
        times.note(1, 0.1)
    assert times.choose_timeout_seconds(1, SILENT) < 5.0


def test_prompt_takes_its_time_per_token_but_at_least_a_decode_step() -> None:
    times = make_times((1, 0.5), (1000, 10.0))

    assert times.choose_timeout_seconds(2000, SILENT) > 20.0
    assert times.choose_timeout_seconds(3, SILENT) == times.choose_timeout_seconds(1, SILENT)


def test_prompts_say_little_about_single_tokens() -> None:
    """A peer that reads weights slowly answers a token much later than its share of a prompt."""
    times = make_times((1000, 1.0))

    assert times.choose_timeout_seconds(1, SILENT) >= UNKNOWN
    assert times.choose_timeout_seconds(1, announce(0.1)) < UNKNOWN


def test_decode_speed_stands_in_for_an_unknown_prompt_speed() -> None:
    slow, fast = (AnswerTimes().choose_timeout_seconds(100, announce(s)) for s in (0.04, 0.01))

    assert slow > 4.0
    assert fast < slow


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_announced_slowness_is_trusted_only_so_far(num_tokens: int) -> None:
    assert AnswerTimes().choose_timeout_seconds(num_tokens, SLOW) == 30.0

    shown = make_times((1, 20.0), (300, 20.0))
    assert shown.choose_timeout_seconds(num_tokens, SILENT) > 100.0


@pytest.mark.parametrize(("shown", "num_tokens"), [(1, 300), (300, 1), (300, 300)])
def test_announced_slowness_is_not_trusted_because_something_else_was_measured(
    shown: int, num_tokens: int
) -> None:
    times = make_times((shown, 0.2))

    assert times.choose_timeout_seconds(num_tokens, announce(1e9, 1e9, 1e9)) == 30.0


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_peer_that_stalls_more_each_time_waits_for_no_more_than_others_would_need(
    num_tokens: int,
) -> None:
    others = [make_times((1, seconds), (100, 100 * seconds)) for seconds in (0.1, 0.2, 5.0)]
    tar_pit, alone = AnswerTimes(), AnswerTimes()
    seconds = 0.0
    for _ in range(12):
        seconds = tar_pit.choose_timeout_seconds(num_tokens, SLOW, others)
        tar_pit.note(num_tokens, 0.99 * seconds)
        alone.note(num_tokens, 0.99 * alone.choose_timeout_seconds(num_tokens, SLOW))

    usual_seconds = 0.2 * num_tokens
    assert seconds <= max(30.0, FLOOR_SECONDS + 24 * usual_seconds)
    # With nobody to compare with, its own usual time holds it back: not six times more each time.
    assert alone.choose_timeout_seconds(num_tokens, SILENT) < 30 * 6**4


def test_slow_peer_keeps_its_patience_among_slow_ones() -> None:
    slow, others = make_times((1000, 100.0)), [make_times((1000, 60.0)) for _ in range(3)]

    assert slow.choose_timeout_seconds(1000, SILENT, others) > 500.0
    assert slow.choose_timeout_seconds(1000, SILENT, [AnswerTimes()]) > 500.0


def test_small_steps_say_nothing_of_long_prompts() -> None:
    """A prompt of two tokens, or a step of three beams, takes as long as one token."""
    times = make_times((2, 0.03), (3, 0.03))

    assert times.choose_timeout_seconds(300, announce(None, 0.001)) < 5.0


@pytest.mark.parametrize("answers", [(), ((1, 0.3),), ((50, 0.3),)])
def test_silence_doubles_the_deadline_and_an_answer_resets_it(
    answers: tuple[tuple[int, float], ...],
) -> None:
    times = make_times(*answers)
    before = times.choose_timeout_seconds(1, SILENT)

    for factor in (2, 4, 8, 16, 16, 16):
        times.note_silence()
        assert times.choose_timeout_seconds(1, SILENT) == factor * before

    times.note(1, 0.0)
    assert times.choose_timeout_seconds(1, SILENT) <= before


def test_announced_queue_counts_until_something_was_measured_and_never_beyond_trust() -> None:
    times = AnswerTimes()
    alone = times.choose_timeout_seconds(1, announce(0.1))
    assert times.choose_timeout_seconds(1, announce(0.1, None, 3.0)) == pytest.approx(alone + 3.0)
    assert times.choose_timeout_seconds(1, announce(0.1, None, 1e12)) <= 30.0

    measured = make_times((1, 0.1))
    alone = measured.choose_timeout_seconds(1, announce(0.1))
    assert measured.choose_timeout_seconds(1, announce(0.1, None, 1e12)) == alone


@pytest.mark.parametrize(
    ("queue", "per_token", "longest", "expected"),
    [
        (0.0, None, 5.0, 5.0),
        (0.0, 1e-12, 5.0, FLOOR_SECONDS),
        (0.5, 0.001, 5.0, FLOOR_SECONDS + 0.5 + 2.048),
        (1e9, 0.001, 5.0, 5.0),
        (0.0, 1e9, 0.7, 0.7),
    ],
)
def test_opening_is_waited_for_as_long_as_a_prompt_may_take(
    queue: float, per_token: float | None, longest: float, expected: float
) -> None:
    peer = announce(per_token=per_token, queue=queue)
    assert choose_open_timeout_seconds(peer, longest) == pytest.approx(expected)
