"""Which work runs together: order, budgets, fairness, and that nobody waits forever."""

from collections import Counter
from dataclasses import replace

import pytest

from shoal.peer.engine.blocks.batch import PART_TOKENS, count_part_tokens
from shoal.peer.engine.scheduler import (
    DECODED_TOKENS,
    LEAD_TOKENS,
    ScheduledPart,
    WaitingStep,
    choose_batch,
    choose_urgent,
    renew_usage,
)


def name_address(client: str) -> tuple[str, str]:
    """Read "address/client", or an address alone."""
    address, _, name = client.partition("/")
    return address, name


def use(**shares: float) -> dict[tuple[str, ...], float]:
    """Return a usage in which every address has one nameless client."""
    return {key: share for name, share in shares.items() for key in ((name,), (name, ""))}


def token(session: int, client: str = "", num_rows: int = 1) -> WaitingStep:
    return WaitingStep(session, name_address(client), num_rows, 1, True)


def prompt(session: int, num_tokens: int, client: str = "", num_rows: int = 1) -> WaitingStep:
    return WaitingStep(session, name_address(client), num_rows, num_tokens, False)


def choose(
    waiting: list[WaitingStep], token_budget: int = 512, prompt_budget: int = 512, **usage: float
) -> list[tuple[int, int]]:
    batch = choose_batch(waiting, use(**usage), token_budget, prompt_budget)
    return [(take.index, take.num_tokens) for take in batch]


def test_decode_steps_go_before_prompts_each_in_order_of_arrival() -> None:
    waiting = [prompt(1, 10), token(2), prompt(3, 10), token(4)]

    assert choose(waiting) == [(1, 1), (3, 1), (0, 10), (2, 10)]


def test_steps_of_one_session_do_not_overtake_each_other() -> None:
    waiting = [prompt(1, 10), token(1), token(2), token(2), prompt(1, 5)]

    assert choose(waiting) == [(2, 1), (0, 10)]


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (1, [(1, 1), (0, 64)]),
        (64, [(1, 1), (0, 64)]),
        (127, [(1, 1), (0, 64)]),
        (128, [(1, 1), (0, 128)]),
        (192, [(1, 1), (0, 150)]),
    ],
)
def test_prompts_go_in_whole_parts_while_their_budget_lasts(
    budget: int, chosen: list[tuple[int, int]]
) -> None:
    assert choose([prompt(1, 150), token(2)], prompt_budget=budget) == chosen


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 65, 256])
def test_part_is_of_one_size_whatever_the_rows(num_rows: int) -> None:
    size = num_rows * count_part_tokens(num_rows)

    assert size <= max(PART_TOKENS, num_rows)
    (chosen,) = choose([prompt(1, 1000, num_rows=num_rows)], prompt_budget=1)
    assert chosen == (0, count_part_tokens(num_rows))


def test_short_prompt_does_not_wait_for_a_long_one_of_the_same_client() -> None:
    queue = Queue(token_budget=64, prompt_budget=PART_TOKENS)
    queue.waiting.append(prompt(0, 100 * PART_TOKENS, "one"))
    for _ in range(10):
        queue.run()
    queue.waiting.append(prompt(1, PART_TOKENS, "one"))
    queue.run()
    queue.run()

    assert [step.session for step in queue.waiting] == [0]


def test_names_that_are_made_up_share_what_their_address_gets() -> None:
    liars = [prompt(number, 1000, f"liar/{number}") for number in range(10)]
    waiting = [*liars, prompt(90, 1000, "one/a"), prompt(91, 1000, "one/b")]

    chosen = dict(choose(waiting, prompt_budget=8 * PART_TOKENS))

    assert sum(chosen.get(index, 0) for index in range(10)) == 4 * PART_TOKENS
    assert chosen[10] == chosen[11] == 2 * PART_TOKENS


def test_tokens_that_cost_more_get_fewer_into_an_iteration() -> None:
    costly = replace(prompt(1, 1000, "costly"), token_cost=3.0)

    chosen = dict(choose([costly, prompt(2, 1000, "plain")], prompt_budget=12 * PART_TOKENS))

    assert chosen == {0: 2 * PART_TOKENS, 1: 6 * PART_TOKENS}
    assert choose([costly], prompt_budget=12 * PART_TOKENS) == [(0, 4 * PART_TOKENS)]


def test_rows_that_cost_more_fill_the_iteration_of_urgent_steps() -> None:
    rows = [replace(token(session, "costly"), token_cost=3.0) for session in range(8)]

    assert len(choose_urgent(rows, {}, 12)) == 4


def test_usage_counts_what_adapters_cost() -> None:
    costly = replace(prompt(1, 100, "costly"), token_cost=3.0)

    renewed = renew_usage({}, [costly, prompt(2, 100, "plain")], [ScheduledPart(0, 64)])

    assert (renewed["costly",], renewed["plain",]) == (3 * 64, 0)


def test_usage_follows_what_was_taken() -> None:
    waiting = [token(1, "a/x", num_rows=3), prompt(2, 100, "a/y"), prompt(3, 100, "c")]
    usage = {("a",): 12.0, ("a", "x"): 5.0, ("a", "y"): 7.0}

    renewed = renew_usage(usage, waiting, [ScheduledPart(0, 1), ScheduledPart(1, 64)])

    assert renewed == {
        ("a",): 12.0 + 3 * DECODED_TOKENS + 64.0,
        ("a", "x"): 3 * DECODED_TOKENS,
        ("a", "x", "1"): 3 * DECODED_TOKENS,
        ("a", "y"): 2.0 + 64.0,
        ("a", "y", "2"): 64.0,
        ("c",): 0.0,
        ("c", ""): 0.0,
        ("c", "", "3"): 0.0,
    }


def test_client_that_was_away_is_not_owed_for_it() -> None:
    usage = renew_usage(use(gone=3.0, here=900.0), [token(1, "here")], [])
    usage = renew_usage(usage, [token(1, "here"), token(2, "gone")], [])

    assert set(usage.values()) == {0.0}


def test_client_that_misses_an_iteration_is_still_ahead() -> None:
    waiting = [token(1, "here")]
    usage = renew_usage(use(here=0.0, away=32000.0), waiting, [])

    assert usage["away",] == 31000.0
    assert choose_urgent([*waiting, token(2, "away")], usage, 512) == [ScheduledPart(0, 1)]


def test_what_somebody_was_ahead_by_is_forgotten_in_time() -> None:
    waiting = [token(1, "here")]
    usage = renew_usage(use(away=10.0**6), waiting, [])
    num_iterations = 1
    while len(usage) > 3:
        usage = renew_usage(usage, waiting, [])
        num_iterations += 1

    assert num_iterations < 1000


@pytest.mark.slow
def test_names_that_come_and_go_are_forgotten() -> None:
    usage: dict[tuple[str, ...], float] = {}
    largest = 0
    for number in range(5000):
        waiting = [token(0, "here"), token(1, f"liar/{number}", num_rows=256)]
        usage = renew_usage(usage, waiting, [ScheduledPart(0, 1), ScheduledPart(1, 1)])
        largest = max(largest, len(usage))

    assert largest < 600


class Queue:
    """Waits as the compute thread does: what is left of a prompt goes back to the front."""

    def __init__(self, token_budget: int, prompt_budget: int) -> None:
        self._budgets = token_budget, prompt_budget
        self._usage: dict[tuple[str, ...], float] = {}
        self.waiting: list[WaitingStep] = []

    def run(self) -> list[WaitingStep]:
        """Make a batch; return the steps that it completed."""
        batch = choose_batch(self.waiting, self._usage, *self._budgets)
        self._usage = renew_usage(self._usage, self.waiting, batch)
        done: list[WaitingStep] = []
        left: list[WaitingStep] = []
        for take in batch:
            step = self.waiting[take.index]
            rest = replace(step, num_tokens=step.num_tokens - take.num_tokens)
            (left if rest.num_tokens else done).append(rest)
        taken = {take.index for take in batch}
        self.waiting = left + [s for i, s in enumerate(self.waiting) if i not in taken]
        return done


def test_step_behind_a_running_one_of_its_session_is_not_urgent() -> None:
    assert choose_urgent([token(1), token(2)], {}, 512, (), [prompt(1, 64)]) == [
        ScheduledPart(1, 1)
    ]


def test_who_is_far_ahead_of_one_that_is_running_is_not_urgent() -> None:
    usage = use(ahead=LEAD_TOKENS + 1.0, one=0.0)

    assert choose_urgent([token(1, "ahead")], usage, 512, (), [prompt(2, 64, "one")]) == []
    assert choose_urgent([token(1, "ahead")], usage, 512) == [ScheduledPart(0, 1)]


def test_what_fills_shares_a_budget_by_what_it_costs() -> None:
    flood = [token(session, "flood") for session in range(1, 9)]
    waiting = [*flood, token(9, "one"), prompt(10, 100, "other")]

    batch = choose_batch(waiting, {}, 512, 64, 16, {("flood", "")})

    assert batch[0] == ScheduledPart(8, 1)
    taken = {take.index: take.num_tokens for take in batch[1:]}
    assert taken.pop(9) == 32
    assert set(taken.values()) == {1}
    assert len(taken) * DECODED_TOKENS == 32


def test_prompt_goes_on_beside_a_stream_of_decode_steps() -> None:
    queue = Queue(token_budget=16, prompt_budget=PART_TOKENS)
    queue.waiting.append(prompt(0, 10 * PART_TOKENS, "prompt"))
    queue.waiting += [token(session, f"c{session}") for session in range(1, 33)]

    for count in range(10):
        done = queue.run()
        assert (0 in [step.session for step in done]) == (count == 9)
        queue.waiting += [token(step.session, step.tenant[0]) for step in done if step.session]


def test_decode_steps_go_at_once_in_a_flood_of_prompts() -> None:
    queue = Queue(token_budget=64, prompt_budget=PART_TOKENS)
    queue.waiting += [prompt(session, 500, "flood") for session in range(1, 51)]

    for _ in range(10):
        queue.waiting.append(token(0, "one"))
        assert [step.session for step in queue.run()].count(0) == 1


def test_short_prompt_passes_a_flood_of_long_ones_of_another_client() -> None:
    queue = Queue(token_budget=64, prompt_budget=PART_TOKENS)
    queue.waiting += [prompt(session, 5000, "flood") for session in range(1, 51)]
    for _ in range(30):
        queue.run()

    queue.waiting.append(prompt(99, 100, "one"))
    num_batches = 1
    while 99 not in [step.session for step in queue.run()]:
        num_batches += 1

    assert num_batches <= 4


def test_flood_of_sessions_of_one_client_leaves_others_their_share() -> None:
    queue = Queue(token_budget=8, prompt_budget=1)
    served: Counter[str] = Counter()
    for session in range(100):
        queue.waiting.append(token(session, "flood"))
    for session in range(100, 104):
        queue.waiting.append(token(session, f"c{session}"))

    for _ in range(200):
        for step in queue.run():
            served[step.tenant[0]] += 1
            queue.waiting.append(token(step.session, step.tenant[0]))

    # Eight rows a batch: the four need at most one each, and get it nearly every time.
    assert min(served[f"c{session}"] for session in range(100, 104)) >= 190
    assert served["flood"] >= 3 * 200


@pytest.mark.parametrize("misses", [False, True])
def test_many_rows_that_decode_get_no_more_than_a_prompt(misses: bool) -> None:
    """Also where they miss an iteration between their steps, as a client far away does."""
    queue = Queue(token_budget=512, prompt_budget=PART_TOKENS)
    served: Counter[str] = Counter()
    queue.waiting.append(prompt(0, 10**6, "victim"))
    queue.waiting += [token(session, "flood", num_rows=256) for session in (1, 2)]
    away: list[WaitingStep] = []

    for _ in range(800):
        before = {step.session: step for step in queue.waiting}
        done = queue.run()
        after = {step.session: step.num_tokens for step in queue.waiting}
        for name, step in before.items():
            served[step.tenant[0]] += step.num_rows * (step.num_tokens - after.get(name, 0))
        back = [token(s.session, "flood", num_rows=256) for s in done]
        queue.waiting += away if misses else back
        away = back

    assert served["flood"] <= 1.2 * served["victim"] + 2 * LEAD_TOKENS


def test_some_who_decode_go_before_a_prompt_for_as_long_as_it_lasts() -> None:
    queue = Queue(token_budget=512, prompt_budget=PART_TOKENS)
    queue.waiting.append(prompt(0, 10**6, "prompt"))

    for _ in range(400):
        queue.waiting += [token(session, "decode") for session in range(1, 9)]
        assert len(queue.run()) == 8
