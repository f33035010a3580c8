"""How much of a prompt goes along, with times that are only numbers."""

import pytest

from shoal.peer.engine.scheduler import IterationBudget

LEAST, MOST, NUM_BLOCKS = 16, 512, 5
ONE, FLOOD, QUIET = ("home", "one"), ("home", "flood"), ("away", "")


def make_budget(token_seconds: float = 0.0005) -> IterationBudget:
    """A budget that has seen iterations of tokens alone and of prompts alone, long ago."""
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    budget.note_iteration(1.0, 0.005, 1, 0)
    budget.note_iteration(2.0, 64 * token_seconds, 0, 64)
    return budget


def test_first_iteration_is_a_small_one() -> None:
    assert IterationBudget(MOST, LEAST, NUM_BLOCKS).choose_num_tokens(0.0) == LEAST


def test_prompts_get_more_when_nobody_decodes() -> None:
    budget = make_budget()
    assert budget.choose_num_tokens(100.0) == pytest.approx(60, abs=1)

    budget.note_decoding(100.0, ONE, 1, 1)
    assert budget.choose_num_tokens(100.1) == pytest.approx(20, abs=1)  # 2 ms for each of 5 blocks
    assert budget.choose_num_tokens(101.0) == pytest.approx(60, abs=1)


@pytest.mark.parametrize(("decode_seconds", "expected"), [(0.02, 40), (0.2, 60)])
def test_prompts_take_no_longer_than_tokens_where_those_take_long(
    decode_seconds: float, expected: int
) -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    budget.note_iteration(1.0, decode_seconds, 8, 0)
    budget.note_iteration(2.0, 0.032, 0, 64)
    budget.note_decoding(100.0, ONE, 1, 1)

    assert budget.choose_num_tokens(100.1) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("token_seconds", "expected"), [(1e-6, MOST), (1.0, LEAST)])
def test_budget_stays_within_its_bounds(token_seconds: float, expected: int) -> None:
    assert make_budget(token_seconds).choose_num_tokens(100.0) == expected


def test_what_fills_gets_as_long_as_the_urgent_step_that_interrupted_it() -> None:
    budget = make_budget()
    budget.note_iteration(99.0, 0.01, 1, 64)
    budget.begin_filling(100.0)
    assert budget.must_give_way(100.0)

    budget.note_iteration(100.006, 0.005, 1, 0)
    assert not budget.must_give_way(100.010)
    assert budget.must_give_way(100.012)


def test_what_fills_is_due_after_an_iteration_without_it() -> None:
    budget = make_budget()
    budget.note_iteration(100.0, 0.02, 3, 0)
    assert budget.is_filling_owed
    budget.begin_filling(101.0)
    assert not budget.must_give_way(101.019)
    assert budget.must_give_way(101.021)

    budget.note_iteration(101.1, 0.02, 0, 64)
    assert not budget.is_filling_owed


def test_what_decoding_costs_is_not_put_down_to_the_prompt() -> None:
    budget, alone = make_budget(), make_budget()
    for index in range(50):
        budget.note_iteration(100.0 + index, 0.005 + 64 * 0.0005, 1, 64)
        alone.note_iteration(100.0 + index, 64 * 0.0005, 0, 64)

    assert budget.choose_num_tokens(1000.0) == pytest.approx(alone.choose_num_tokens(1000.0), abs=2)


def test_length_of_iterations_is_followed() -> None:
    budget = make_budget()
    assert budget.iteration_seconds > 0
    for index in range(50):
        budget.note_iteration(100.0 + index, 0.2, 1, 64)
    assert budget.iteration_seconds == pytest.approx(0.2, rel=0.01)


def note_sessions(
    budget: IterationBudget, now: float, tenant: tuple[str, str], count: int, num_rows: int = 1
) -> None:
    for session in range(count):
        budget.note_decoding(now, tenant, session, num_rows)


@pytest.mark.parametrize(("num_sessions", "num_rows"), [(5, 1), (1, 5), (3, 2)])
def test_who_decodes_many_rows_crowds_those_who_decode_few(
    num_sessions: int, num_rows: int
) -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    note_sessions(budget, 100.0, FLOOD, num_sessions, num_rows)
    assert budget.find_crowding(100.0) == set()

    note_sessions(budget, 100.1, ONE, 4)
    assert budget.find_crowding(100.2) == {FLOOD}
    note_sessions(budget, 100.3, FLOOD, num_sessions, num_rows)
    assert budget.find_crowding(100.4) == set(), "the others are gone"


@pytest.mark.parametrize(("token_cost", "crowds"), [(2.0, False), (2.1, True)])
def test_few_rows_that_cost_as_much_as_many_crowd(token_cost: float, crowds: bool) -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    for session in range(2):
        budget.note_decoding(100.0, FLOOD, session, 1 * token_cost)
    note_sessions(budget, 100.0, QUIET, 1)

    assert budget.find_crowding(100.0) == ({FLOOD} if crowds else set())


def test_those_who_all_decode_many_rows_do_not_crowd_each_other() -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    for tenant in (ONE, FLOOD, QUIET):
        note_sessions(budget, 100.0, tenant, 16)

    assert budget.find_crowding(100.0) == set()


def test_names_that_are_made_up_crowd_together() -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    names = [("home", f"name {number}") for number in range(5)]
    for name in names:
        note_sessions(budget, 100.0, name, 1)
    assert budget.find_crowding(100.0) == set()

    note_sessions(budget, 100.0, QUIET, 1)
    assert budget.find_crowding(100.0) == set(names)


def test_who_decodes_is_remembered_for_longer_where_iterations_are_long() -> None:
    budget = IterationBudget(MOST, LEAST, NUM_BLOCKS)
    budget.note_iteration(100.0, 2.0, 8, 0)
    note_sessions(budget, 100.0, ONE, 1)
    note_sessions(budget, 110.0, FLOOD, 8)

    assert budget.find_crowding(115.0) == {FLOOD}
    assert budget.find_crowding(117.0) == set()
