"""Which steps run together: order, budget, and that nobody waits forever."""

import random
from dataclasses import replace
from itertools import count

import pytest

from shoal.peer.engine.scheduler import MAX_PASSES, WaitingStep, choose_batch


def token(session: int, num_rows: int = 1, num_passes: int = 0) -> WaitingStep:
    return WaitingStep(session, num_rows, True, num_passes)


def prompt(session: int, num_tokens: int, num_passes: int = 0) -> WaitingStep:
    return WaitingStep(session, num_tokens, False, num_passes)


def test_nothing_waiting_gives_an_empty_batch() -> None:
    assert choose_batch([], 64) == []


def test_decode_steps_go_before_prompts_each_in_order_of_arrival() -> None:
    waiting = [prompt(1, 10), token(2), prompt(3, 10), token(4)]

    assert choose_batch(waiting, 64) == [1, 3, 0, 2]


def test_steps_of_one_session_do_not_overtake_each_other() -> None:
    waiting = [prompt(1, 10), token(1), token(2), token(2), prompt(1, 5)]

    assert choose_batch(waiting, 64) == [2, 0]


@pytest.mark.parametrize(
    ("budget", "chosen"), [(1, [1]), (2, [1, 2]), (31, [1, 2]), (32, [1, 2, 0]), (99, [1, 2, 0])]
)
def test_budget_bounds_the_tokens_of_a_batch(budget: int, chosen: list[int]) -> None:
    assert choose_batch([prompt(1, 30), token(2), token(3)], budget) == chosen


def test_rows_count_like_tokens() -> None:
    assert choose_batch([token(1, 8), token(2, 8), token(3, 8)], 16) == [0, 1]


def test_first_choice_is_taken_whatever_its_size() -> None:
    assert choose_batch([prompt(1, 5000)], 64) == [0]
    assert choose_batch([token(1, 256), token(2)], 64) == [0]


def test_small_prompt_does_not_overtake_a_large_one() -> None:
    assert choose_batch([token(1), prompt(2, 100), prompt(3, 1)], 64) == [0]


def test_step_that_was_passed_over_too_often_comes_along_beside_the_budget() -> None:
    assert choose_batch([token(1), prompt(2, 500, MAX_PASSES), token(3)], 64) == [1, 0, 2]
    assert choose_batch([token(1), prompt(2, 500, MAX_PASSES - 1)], 64) == [0]


def test_only_the_oldest_of_those_passed_over_comes_along() -> None:
    waiting = [prompt(1, 500, MAX_PASSES), prompt(2, 500, MAX_PASSES + 5), token(3)]

    assert choose_batch(waiting, 64) == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_keeps_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        waiting = [
            WaitingStep(rng.randrange(5), rng.randint(1, 40), rng.random() < 0.5, rng.randrange(12))
            for _ in range(rng.randint(1, 12))
        ]
        budget = rng.randint(1, 100)

        chosen = choose_batch(waiting, budget)

        sessions = [waiting[index].session for index in chosen]
        assert chosen
        assert len(set(sessions)) == len(sessions)
        assert all(
            step.session != waiting[index].session for index in chosen for step in waiting[:index]
        )
        rest = chosen[1:] if waiting[chosen[0]].num_passes >= MAX_PASSES else chosen
        assert len(chosen) == 1 or sum(waiting[index].num_tokens for index in rest) <= budget


class Queue:
    """Waits as the compute thread does: in order of arrival, counting the batches passed."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._names = count()
        self.waiting: list[tuple[int, WaitingStep]] = []

    def add(self, step: WaitingStep) -> int:
        name = next(self._names)
        self.waiting.append((name, step))
        return name

    def take_batch(self) -> dict[int, WaitingStep]:
        chosen = choose_batch([step for _, step in self.waiting], self._token_budget)
        taken = {self.waiting[index][0]: self.waiting[index][1] for index in chosen}
        self.waiting = [
            (name, replace(step, num_passes=step.num_passes + 1))
            for name, step in self.waiting
            if name not in taken
        ]
        return taken


def test_large_prompt_is_not_starved_by_a_stream_of_decode_steps() -> None:
    queue = Queue(token_budget=64)
    for session in range(1, 33):
        queue.add(token(session))
    name = queue.add(prompt(0, 500))

    batches = [queue.take_batch()]
    while name not in batches[-1] and len(batches) < 100:
        for step in batches[-1].values():
            queue.add(token(step.session))
        batches.append(queue.take_batch())

    assert len(batches) == MAX_PASSES + 1
    assert all(len(batch) == 32 for batch in batches[:-1])


def test_decode_steps_go_at_once_in_a_flood_of_prompts() -> None:
    queue = Queue(token_budget=64)
    for session in range(1, 51):
        queue.add(prompt(session, 500))
    for session in range(51, 51 + 2 * MAX_PASSES):
        queue.take_batch()
        queue.add(prompt(session, 500))

    for _ in range(10):
        name = queue.add(token(0))
        batch = queue.take_batch()
        assert name in batch
        assert len(batch) == 2, "a prompt comes along each time"


@pytest.mark.parametrize("seed", range(10))
def test_no_step_waits_longer_than_for_those_before_it(seed: int) -> None:
    """Whatever arrives later, a step goes after MAX_PASSES batches and those ahead of it."""
    rng = random.Random(seed)
    queue = Queue(token_budget=32)
    latest: dict[int, int] = {}  # step: the last batch it may be in

    num_batches = 400
    for batch in range(num_batches):
        for _ in range(rng.choice((0, 0, 1, 2, 3)) if len(queue.waiting) < 30 else 0):
            num_ahead = len(queue.waiting)
            is_decoding = rng.random() < 0.7
            num_tokens = rng.randint(1, 8) if is_decoding else rng.randint(1, 200)
            step = WaitingStep(rng.randrange(12), num_tokens, is_decoding)
            latest[queue.add(step)] = batch + MAX_PASSES + num_ahead
        for name in queue.take_batch():
            assert batch <= latest.pop(name)

    assert all(num_batches <= last for last in latest.values())
