"""The compute thread with an engine that only notes what it is told to do."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from compute_thread_scene import FakeCache, NotingEngine, make_thread, make_work, on_loop

from shoal.peer.engine.adapters.adapter import Adapter, AdapterPart
from shoal.peer.engine.blocks.batch import PART_TOKENS
from shoal.peer.engine.compute_thread import ComputedStep
from shoal.peer.engine.scheduler import DECODED_TOKENS, IterationBudget
from shoal.peer.engine.steps import StepWork


@on_loop()
async def test_step_is_answered_with_its_own_result() -> None:
    engine = NotingEngine()

    async with make_thread(engine) as compute:
        works = [make_work(FakeCache(), position) for position in range(5)]
        answers = await asyncio.gather(*(compute.submit(work) for work in works))
    for work, answer in zip(works, answers, strict=True):
        assert torch.equal(answer.hidden_BTH, work.hidden_BTH + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
@on_loop()
async def test_event_loops_come_before_the_thread_that_computes() -> None:
    async with make_thread(NotingEngine()) as compute:
        niceness = await compute.call(lambda: os.getpriority(os.PRIO_PROCESS, 0))
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0)


@on_loop()
async def test_steps_of_a_session_are_computed_one_by_one_in_their_order() -> None:
    engine = NotingEngine()
    caches = [FakeCache(), FakeCache(), FakeCache()]
    sizes = (5, 1, 1, 7, 1, 3)

    engine.gate.clear()
    async with make_thread(engine, token_budget=8) as compute:
        works = [make_work(cache, i, size) for i, size in enumerate(sizes) for cache in caches]
        futures = [compute.submit(work) for work in works]
        engine.gate.set()
        await asyncio.gather(*futures)

    for cache in caches:
        computed = [work.position for work in engine.order if work.cache is cache]
        assert computed == list(range(len(sizes)))
    for batch in engine.batches:
        assert len({id(work.cache) for work in batch}) == len(batch)


@on_loop()
async def test_prompts_with_an_adapter_pay_for_its_numbers() -> None:
    """By the cost of a token: the adapter has half as many numbers as the weights have bytes."""
    numbers = torch.ones(8, 8), torch.ones(8, 8)
    part = AdapterPart("up", slice(0, 8), *numbers, scale=1.0, order_O=None)
    adapter = Adapter(8, {(0, "up"): (part,)})
    engine = NotingEngine()
    engine.num_weight_bytes = 2 * adapter.num_numbers
    costly = make_work(FakeCache(), num_tokens=3 * PART_TOKENS, adapter=adapter)
    plain = make_work(FakeCache(), num_tokens=9 * PART_TOKENS)

    engine.gate.clear()
    async with make_thread(engine, now=lambda: 0.0) as compute:
        first = compute.submit(make_work(FakeCache()))
        await engine.wait_entered()
        futures = [compute.submit(costly, ("a", "")), compute.submit(plain, ("b", ""))]
        engine.gate.set()
        await asyncio.gather(first, *futures)

    parts = [work.cache for work in engine.order if work.num_tokens == PART_TOKENS]
    assert len(parts) == 12
    assert [cache is costly.cache for cache in parts[:8]].count(True) == 2


@on_loop()
async def test_rows_that_wait_for_long_crowd_as_before() -> None:
    engine, clock = NotingEngine(), [0.0]
    compute = make_thread(engine, now=lambda: clock[0])  # not entered: the test is the thread
    flood = [compute.submit(make_work(FakeCache()), ("flood", "")) for _ in range(12)]
    clock[0] = 60.0
    quiet = make_work(FakeCache())
    answer = compute.submit(quiet, ("quiet", ""))

    compute.iterate()
    assert engine.batches == [[quiet]]

    while not all(future.done() for future in (answer, *flood)):
        compute.iterate()
        await asyncio.sleep(0)


@on_loop()
async def test_cancelled_step_that_waits_is_never_computed() -> None:
    engine = NotingEngine()
    first, dropped, last = (make_work(FakeCache(), position) for position in range(3))

    engine.gate.clear()
    async with make_thread(engine) as compute:
        running = compute.submit(first)
        await engine.wait_entered()
        waiting, other = compute.submit(dropped), compute.submit(last)
        waiting.cancel()
        engine.gate.set()
        await asyncio.gather(running, other)

    assert engine.order == [first, last]


@on_loop()
async def test_step_that_is_cancelled_while_it_is_computed_disturbs_nobody() -> None:
    engine = NotingEngine()

    engine.gate.clear()
    async with make_thread(engine) as compute:
        running = compute.submit(make_work(FakeCache()))
        await engine.wait_entered()
        running.cancel()
        engine.gate.set()
        assert (await compute.submit(make_work(FakeCache(), 4))).hidden_BTH[0, 0, 0] == 5


class LateCondition(threading.Condition):
    """Lets something happen before the lock is taken, once."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], object] = bool

    def __enter__(self) -> bool:
        before, self.before = self.before, bool
        before()
        return super().__enter__()


@on_loop()
async def test_no_step_is_lost_that_comes_while_a_batch_is_chosen() -> None:
    engine, wake = NotingEngine(), LateCondition()

    compute = make_thread(engine)  # not entered: the test is the thread
    compute.wake = wake
    early = compute.submit(make_work(FakeCache()))
    wake.before = compute.iterate
    late = compute.submit(make_work(FakeCache()))
    compute.iterate()
    await asyncio.gather(early, late)

    assert [len(batch) for batch in engine.batches] == [1, 1]


class PatientBudget(IterationBudget):
    """Gives way always or never; nobody but the flood crowds."""

    def __init__(self, gives_way: bool = True) -> None:
        super().__init__(512, PART_TOKENS, 1)
        self._gives_way = gives_way

    def must_give_way(self, now: float) -> bool:
        return self._gives_way

    def find_crowding(self, now: float) -> set[tuple[str, str]]:
        return {FLOOD}


FLOOD, ONE = ("home", "flood"), ("home", "one")


@on_loop()
async def test_flood_fills_while_others_are_urgent() -> None:
    """With iterations that are much longer than what is recent without them."""

    engine = NotingEngine()
    now = 0.0

    def take_long() -> None:
        nonlocal now
        now += 5.0

    compute = make_thread(engine, now=lambda: now)  # not entered: the test is the thread
    caches = [FakeCache() for _ in range(32)]
    engine.inside = take_long
    futures = [compute.submit(make_work(cache), FLOOD) for cache in caches]
    compute.iterate()
    futures += [compute.submit(make_work(cache), FLOOD) for cache in caches]
    for _ in range(4):
        futures.append(compute.submit(make_work(FakeCache()), ONE))
        compute.iterate()
    for future in futures:
        future.cancel()

    alone, *in_turn = [len(batch) for batch in engine.batches]
    assert alone == 32
    num_filling = PART_TOKENS // DECODED_TOKENS
    assert in_turn == [1 + num_filling, 1, 1 + num_filling, 1]


async def compute_while_filling(
    engine: NotingEngine,
    budget: IterationBudget,
    filling: Sequence[StepWork],
    arriving: Sequence[StepWork],
    tenant: tuple[str, str],
) -> list[asyncio.Future[ComputedStep]]:
    """Compute steps of the flood during which others arrive; the latter's futures come last."""
    compute = make_thread(engine)  # not entered: the test is the thread
    compute.budget = budget
    futures = [compute.submit(work, FLOOD) for work in filling]

    def arrive() -> None:
        engine.between = bool
        futures.extend(compute.submit(work, tenant) for work in arriving)

    engine.between = arrive
    while compute._jobs:
        compute.iterate()
    await asyncio.gather(*futures)
    return futures


@pytest.mark.parametrize("gives_way", [True, False])
@on_loop()
async def test_urgent_step_is_computed_in_the_midst_of_a_prompt(gives_way: bool) -> None:
    engine = NotingEngine()
    prompt, token = make_work(FakeCache(), 7, PART_TOKENS), make_work(FakeCache(), 3)

    budget = PatientBudget(gives_way)
    futures = await compute_while_filling(engine, budget, [prompt], [token], ONE)
    for future, work in zip(futures, (prompt, token), strict=True):
        assert torch.equal(future.result().hidden_BTH, work.hidden_BTH + 1)

    assert engine.batches == [[prompt], [token]]
    assert engine.finished == ([[token], [prompt]] if gives_way else [[prompt], [token]])


@on_loop()
async def test_flood_gives_way_to_others_and_not_to_itself() -> None:
    engine = NotingEngine()
    flood = [make_work(FakeCache(), position) for position in range(3)]
    more, other = make_work(FakeCache(), 5), make_work(FakeCache(), 6)

    await compute_while_filling(engine, PatientBudget(), flood, [more], FLOOD)
    assert engine.finished == [flood, [more]]
    engine.batches, engine.finished = [], []
    await compute_while_filling(engine, PatientBudget(), flood, [other], ONE)
    assert engine.finished == [[other], flood]


@on_loop()
async def test_next_step_of_a_session_waits_for_the_prompt_that_is_running() -> None:
    engine = NotingEngine()
    cache = FakeCache()
    prompt, token = make_work(cache, 0, PART_TOKENS), make_work(cache, PART_TOKENS)

    await compute_while_filling(engine, PatientBudget(), [prompt], [token], FLOOD)

    assert engine.finished == [[prompt], [token]]


@on_loop()
async def test_time_of_an_interruption_counts_as_waiting() -> None:
    engine = NotingEngine()
    budget = PatientBudget()
    prompt, token = make_work(FakeCache(), 0, PART_TOKENS), make_work(FakeCache())

    interrupted, urgent = await compute_while_filling(engine, budget, [prompt], [token], ONE)
    assert interrupted.result().queue_seconds >= urgent.result().compute_seconds


@on_loop()
async def test_waiting_time_grows_with_those_who_wait_and_is_told_to_each_step() -> None:
    engine = NotingEngine()

    async with make_thread(engine) as compute:
        assert compute.queue_seconds == 0
        first = await compute.submit(make_work(FakeCache()))
        assert compute.queue_seconds == 0  # nobody waits
        engine.gate.clear()
        engine.entered.clear()
        running = compute.submit(make_work(FakeCache()))
        await engine.wait_entered()

        cache = FakeCache()
        waiting = [compute.submit(make_work(cache, position)) for position in range(4)]
        one_of_them = compute.queue_seconds
        others = [compute.submit(make_work(FakeCache()), (f"host {n}", "")) for n in range(3)]

        assert one_of_them > 0
        assert compute.queue_seconds == pytest.approx(4 * one_of_them)
        engine.gate.set()
        told = [first, await running, *[await future for future in waiting]]
        await asyncio.gather(*others)
        assert all(answer.compute_seconds > 0 for answer in told)
        # Each of them waited at least for the one that was computed before it.
        for earlier, later in itertools.pairwise(told[2:]):
            assert later.queue_seconds > earlier.compute_seconds


@on_loop()
async def test_calls_and_posts_run_in_their_order() -> None:
    done: list[int] = []

    async with make_thread(NotingEngine()) as compute:
        for number in range(0, 20, 2):
            compute.post(lambda number=number: done.append(number))
            compute.call(lambda number=number: done.append(number + 1))
        await compute.call(lambda: None)

    assert done == list(range(20))


@on_loop()
async def test_calls_that_keep_coming_leave_room_for_steps() -> None:
    is_over = threading.Event()

    async with make_thread(NotingEngine()) as compute:

        def call_again() -> None:
            if not is_over.is_set():
                compute.post(call_again)

        compute.post(call_again)
        await compute.submit(make_work(FakeCache()))
        is_over.set()


@on_loop()
async def test_prompt_is_computed_in_parts_between_which_others_decode() -> None:
    engine = NotingEngine()
    num_tokens = 2 * PART_TOKENS + 10
    now = 0.0

    def take_a_millisecond_per_token() -> None:
        nonlocal now
        now += 1e-3 * sum(work.num_tokens for work in engine.batches[-1])

    compute = make_thread(engine, now=lambda: now)  # not entered: the test is the thread
    engine.inside = take_a_millisecond_per_token
    cache, decoding = FakeCache(), FakeCache()
    waiting = compute.submit(make_work(cache, 5, num_tokens), ("prompt", ""))
    behind = compute.submit(make_work(cache, 5 + num_tokens), ("prompt", ""))
    num_batches = 0
    while not behind.done() and num_batches < 10_000:
        token = compute.submit(make_work(decoding, num_batches), ("other", ""))
        compute.iterate()
        num_batches += 1
        assert engine.batches[-1][0].cache is decoding
        await asyncio.sleep(0)
        assert token.done()
    computed = await waiting
    assert torch.equal(computed.hidden_BTH, torch.full((1, num_tokens, 2), 6.0))
    parts = [(work.position, work.num_tokens) for work in engine.order if work.cache is cache]
    assert parts == [
        (5, PART_TOKENS),
        (5 + PART_TOKENS, PART_TOKENS),
        (5 + 2 * PART_TOKENS, 10),
        (5 + num_tokens, 1),
    ]
    assert (await behind).hidden_BTH[0, 0, 0] == 6 + num_tokens


@on_loop()
async def test_prompt_of_which_one_token_is_asked_answers_with_that() -> None:
    engine = NotingEngine()

    async with make_thread(engine) as compute:
        work = replace(make_work(FakeCache(), num_tokens=150), last_token_only=True)
        answer = await compute.submit(work)
    # This engine answers every token that it is given: the last part's are left.
    assert answer.hidden_BTH.shape[1] == engine.order[-1].num_tokens


@on_loop()
async def test_rest_of_a_cancelled_prompt_is_not_computed() -> None:
    engine = NotingEngine()

    engine.gate.clear()
    async with make_thread(engine) as compute:
        running = compute.submit(make_work(FakeCache(), num_tokens=5 * PART_TOKENS))
        await engine.wait_entered()
        running.cancel()
        engine.gate.set()
        await compute.submit(make_work(FakeCache()))

    assert [work.num_tokens for work in engine.order] == [PART_TOKENS, 1]
