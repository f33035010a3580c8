"""How much of a prompt goes along, with times that are only numbers."""

import pytest

from shoal.peer.engine.pace import Pace

LEAST, MOST = 16, 512


def make_pace(token_seconds: float = 0.0005) -> Pace:
    """A pace that has seen iterations of tokens alone and of prompts alone, long ago."""
    pace = Pace(MOST, LEAST)
    pace.note(1.0, 0.005, 1, 0)
    pace.note(2.0, 64 * token_seconds, 0, 64)
    return pace


def test_first_iteration_is_a_small_one() -> None:
    assert Pace(MOST, LEAST).choose_budget(0.0) == LEAST


def test_prompts_get_more_when_nobody_decodes() -> None:
    pace = make_pace()
    assert pace.choose_budget(100.0) == pytest.approx(60, abs=1)

    pace.note_decoding(100.0)
    assert pace.choose_budget(100.1) == LEAST
    assert pace.choose_budget(101.0) == pytest.approx(60, abs=1)


def test_prompts_take_no_longer_than_tokens_where_those_take_long() -> None:
    pace = Pace(MOST, LEAST)
    pace.note(1.0, 0.02, 8, 0)
    pace.note(2.0, 0.032, 0, 64)
    pace.note_decoding(100.0)

    assert pace.choose_budget(100.1) == pytest.approx(40, abs=1)


@pytest.mark.parametrize(("token_seconds", "expected"), [(1e-6, MOST), (1.0, LEAST)])
def test_budget_stays_within_its_bounds(token_seconds: float, expected: int) -> None:
    assert make_pace(token_seconds).choose_budget(100.0) == expected


def test_prompts_pause_for_as_long_as_they_took_while_somebody_decodes() -> None:
    pace = make_pace()
    pace.note_decoding(100.0)
    pace.note(100.1, 0.037, 1, 64)

    assert pace.choose_budget(100.11) == 0
    assert pace.resume_in(100.11) == pytest.approx(0.022, abs=0.001)
    assert pace.choose_budget(100.1 + 0.033) > 0


def test_prompts_do_not_pause_when_nobody_decodes() -> None:
    pace = make_pace()
    pace.note(100.1, 0.032, 0, 64)

    assert pace.resume_in(100.1) == 0.0
    assert pace.choose_budget(100.1) > LEAST


def test_what_decoding_costs_is_not_put_down_to_the_prompt() -> None:
    pace, alone = make_pace(), make_pace()
    for index in range(50):
        pace.note(100.0 + index, 0.005 + 64 * 0.0005, 1, 64)
        alone.note(100.0 + index, 64 * 0.0005, 0, 64)

    assert pace.choose_budget(1000.0) == pytest.approx(alone.choose_budget(1000.0), abs=2)


def test_length_of_iterations_is_followed() -> None:
    pace = make_pace()
    assert pace.iteration_seconds > 0
    for index in range(50):
        pace.note(100.0 + index, 0.2, 1, 64)
    assert pace.iteration_seconds == pytest.approx(0.2, rel=0.01)


def test_holders_are_in_company_while_others_decode() -> None:
    pace = Pace(MOST, LEAST)
    one, flood, quiet = ("home", "one"), ("home", "flood"), ("away", "")
    pace.note_decoding(100.0, one)
    assert pace.find_in_company({one, flood}, 100.1) == {flood}

    pace.note_decoding(100.2, flood)
    assert pace.find_in_company({one, flood, quiet}, 100.2) == {one, flood, quiet}
    assert pace.find_in_company({one, flood, quiet}, 100.4) == {one, quiet}

    pace.note_decoding(100.4, one)
    assert pace.find_in_company({one, flood}, 100.5) == {flood}
    assert pace.find_in_company({one, flood}, 200.0) == set()
