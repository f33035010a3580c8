"""The scheduler beside an oracle, over random arrivals: rules that are slow, short and obvious.

The oracle looks at everybody anew for every single part that is taken, and keeps an account of its
own of who had how much.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from shoal.peer.engine.blocks.batch import count_part_tokens
from shoal.peer.engine.scheduler import (
    DECODED_TOKENS,
    LEAD_TOKENS,
    ScheduledPart,
    WaitingStep,
    choose_batch,
    choose_urgent,
    renew_usage,
)

Tenant = tuple[str, str]
PART_TOKENS = 16
MAX_ROWS = 20
MAX_TOKEN_COST = 2.5
BUDGET = 64


def find_heads(waiting: Sequence[WaitingStep]) -> list[int]:
    """Only the oldest step of a session may go."""
    return [
        index
        for index, step in enumerate(waiting)
        if all(earlier.session != step.session for earlier in waiting[:index])
    ]


def keys_of(step: WaitingStep) -> list[tuple[str, ...]]:
    return [step.tenant[:1], step.tenant, (*step.tenant, str(step.session))]


def is_urgent(
    step: WaitingStep,
    waiting: Sequence[WaitingStep],
    usage: Mapping[tuple[str, ...], float],
    crowding: Collection[Tenant],
) -> bool:
    """Who decodes is, unless he crowds or has had far more than somebody who waits beside him."""
    if not step.is_decoding or step.tenant in crowding:
        return False
    addresses = [usage.get(other.tenant[:1], 0.0) for other in waiting]
    clients = [
        usage.get(other.tenant, 0.0) for other in waiting if other.tenant[0] == step.tenant[0]
    ]
    return (
        usage.get(step.tenant[:1], 0.0) - min(addresses) <= LEAD_TOKENS
        and usage.get(step.tenant, 0.0) - min(clients) <= LEAD_TOKENS
    )


def take_slowly(
    waiting: Sequence[WaitingStep],
    candidates: Sequence[int],
    had: defaultdict[tuple[str, ...], float],
    budget: int,
    counts_cost: bool,
) -> Counter[int]:
    """One part after the other: for the address, client and session that has had the least."""

    def find_place(index: int) -> list[tuple[float, int]]:
        """What address, client and session had; of equal ones goes who came first."""
        return [
            (had[key], min(i for i in candidates if key in keys_of(waiting[i])))
            for key in keys_of(waiting[index])
        ]

    taken: Counter[int] = Counter()
    left: float = budget
    while unfinished := [i for i in candidates if taken[i] < waiting[i].num_tokens]:
        index = min(unfinished, key=find_place)
        step = waiting[index]
        num_tokens = min(
            count_part_tokens(step.num_rows, PART_TOKENS), step.num_tokens - taken[index]
        )
        needed = num_tokens * step.num_rows * step.token_cost
        cost = DECODED_TOKENS * needed if step.is_decoding else needed
        needed = cost if counts_cost else needed
        if left <= 0 or (needed > left and left < budget):
            break
        left -= needed
        taken[index] += num_tokens
        for key in keys_of(step):
            had[key] += cost
    return taken


def choose_slowly(
    waiting: Sequence[WaitingStep],
    usage: Mapping[tuple[str, ...], float],
    token_budget: int,
    filling_budget: int,
    crowding: Collection[Tenant],
) -> tuple[Counter[int], Counter[int]]:
    """Return the tokens that are taken of each step that is urgent, and of each that fills."""
    heads = find_heads(waiting)
    urgent = [i for i in heads if is_urgent(waiting[i], waiting, usage, crowding)]
    filling = [i for i in heads if i not in urgent]
    had = defaultdict(float, usage)
    return (
        take_slowly(waiting, urgent, had, token_budget, counts_cost=False),
        take_slowly(waiting, filling, had, filling_budget, counts_cost=True),
    )


@dataclass
class Peer:
    """Random clients before one queue; `had` is the oracle's account since the beginning."""

    dice: random.Random
    has_tokens: bool
    waiting: list[WaitingStep] = field(default_factory=list)
    usage: dict[tuple[str, ...], float] = field(default_factory=dict)
    had: defaultdict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    num_sessions: int = 0

    def arrive(self) -> None:
        """Some addresses have several clients, some clients several sessions with some steps."""
        while len(self.waiting) < 20 and self.dice.random() < 0.5:
            tenant = f"address {self.dice.randrange(4)}", f"client {self.dice.randrange(3)}"
            self.num_sessions += 1
            for _ in range(self.dice.randint(1, 3)):
                is_decoding = self.has_tokens and self.dice.random() < 0.6
                num_tokens = 1 if is_decoding else self.dice.randint(2, 100)
                num_rows = self.dice.choice([1, 1, 2, 5, MAX_ROWS])
                cost = self.dice.choice([1.0, 1.0, MAX_TOKEN_COST])
                self.waiting.append(
                    WaitingStep(self.num_sessions, tenant, num_rows, num_tokens, is_decoding, cost)
                )

    def draw_crowding(self) -> set[Tenant]:
        tenants = sorted({step.tenant for step in self.waiting})
        return set(self.dice.sample(tenants, self.dice.randint(0, min(2, len(tenants)))))

    def go_on(self, batch: Sequence[ScheduledPart]) -> None:
        """Compute what was taken; what is left of it goes back to the front."""
        self.usage = renew_usage(self.usage, self.waiting, batch)
        taken = {take.index: take.num_tokens for take in batch}
        left: list[WaitingStep] = []
        for index, num_tokens in taken.items():
            step = self.waiting[index]
            for key in keys_of(step):
                self.had[key] += step.count_cost(num_tokens)
            if num_tokens < step.num_tokens:
                left.append(replace(step, num_tokens=step.num_tokens - num_tokens))
        self.waiting = left + [s for i, s in enumerate(self.waiting) if i not in taken]


@pytest.mark.parametrize("seed", range(8))
def test_batches_are_those_of_the_oracle(seed: int) -> None:
    print("seed", seed)
    peer = Peer(random.Random(seed), has_tokens=True)
    for _ in range(60):
        peer.arrive()
        crowding = peer.draw_crowding()
        budgets = peer.dice.randint(1, 60), peer.dice.randint(1, 200)
        urgent, filling = choose_slowly(peer.waiting, peer.usage, *budgets, crowding)

        batch = choose_batch(peer.waiting, peer.usage, *budgets, PART_TOKENS, crowding)
        first = choose_urgent(peer.waiting, peer.usage, budgets[0], crowding)

        assert {take.index: take.num_tokens for take in first} == urgent
        assert {take.index: take.num_tokens for take in batch} == urgent + filling
        assert batch[: len(urgent)] == first
        assert bool(batch) == bool(peer.waiting)
        peer.go_on(batch)


@pytest.mark.parametrize("seed", range(6))
def test_who_waits_beside_others_gets_what_they_get(seed: int) -> None:
    """While two addresses, or two clients of one, both have something waiting, who is not ahead of
    the other gets ahead by one iteration at most (its next step may wait behind a short one), and
    who is gets no further. And nobody starves.
    """
    print("seed", seed)
    peer = Peer(random.Random(seed), has_tokens=False)
    began: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[float, float]] = {}
    num_compared = 0
    for count in itertools.count():
        if count < 100:
            peer.arrive()
        elif not peer.waiting:
            break
        assert count < 2000, "somebody starves"
        present = {key for step in peer.waiting for key in keys_of(step)[:2]}
        usage, had = Counter(peer.usage), peer.had
        began = {
            (one, other): began.get(
                (one, other), (usage[one] - usage[other], had[one] - had[other])
            )
            for one, other in itertools.permutations(present, 2)
            if one[:-1] == other[:-1]
        }

        peer.go_on(choose_batch(peer.waiting, peer.usage, 1, BUDGET, PART_TOKENS))

        for (one, other), (ahead, before) in began.items():
            assert (
                ahead + had[one] - had[other] - before
                <= max(ahead, 0) + BUDGET + MAX_ROWS * MAX_TOKEN_COST
            )
            num_compared += 1
    assert num_compared > 1000
