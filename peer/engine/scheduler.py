"""Which waiting work the compute thread takes next: pure decisions.

One iteration carries every step that decodes and, while its budget lasts, parts of prompts. A
prompt is cut into parts at fixed places, whatever else goes on: so nobody's results depend on the
company.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PART_TOKENS = 64
"""Rows times tokens of one part of a prompt: the least that is worth reading the weights for."""


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """What the policy may know of a step that waits.

    `session` tells sessions apart: steps of one session never overtake each other. `client` is
    whose it is, for fairness. `num_tokens` are the tokens per row that are not computed yet.
    """

    session: int
    client: str
    num_rows: int
    num_tokens: int
    is_decoding: bool


@dataclass(frozen=True, slots=True)
class Take:
    """The next `num_tokens` tokens per row of the waiting step at `index`."""

    index: int
    num_tokens: int


def count_part_tokens(num_rows: int) -> int:
    """Return how many tokens per row make one part of a prompt: a power of two.

    >>> [count_part_tokens(num_rows) for num_rows in (1, 2, 3, 100)]
    [64, 32, 16, 1]
    """
    return 2 ** (max(1, PART_TOKENS // num_rows).bit_length() - 1)


def choose_batch(
    waiting: Sequence[WaitingStep],
    usage: Mapping[str, float],
    token_budget: int,
    prompt_budget: int,
) -> list[Take]:
    """Return what to compute together; empty only while prompts wait and have no budget.

    `waiting` is in order of arrival; only the oldest step of a session is a candidate. Every step
    that decodes comes along, up to `token_budget` rows, and parts of prompts, up to
    `prompt_budget` tokens. Each budget is shared out to the client that has had the least so far
    (`usage`, in rows times tokens), and within a client to who came first: so nobody is passed
    over for ever. The first part is taken whatever its size.

    >>> prompt, token = WaitingStep(1, "a", 1, 300, False), WaitingStep(2, "b", 1, 1, True)
    >>> choose_batch([prompt, token], {}, 512, 128)
    [Take(index=1, num_tokens=1), Take(index=0, num_tokens=128)]
    >>> choose_batch([prompt, token], {}, 512, 0)
    [Take(index=1, num_tokens=1)]
    """
    heads: dict[int, int] = {}
    for index, step in enumerate(waiting):
        heads.setdefault(step.session, index)
    shares = dict(usage)
    taken: dict[int, int] = {}
    for is_decoding, budget in ((True, token_budget), (False, prompt_budget)):
        candidates = [i for i in heads.values() if waiting[i].is_decoding is is_decoding]
        left = budget
        for index in _in_fair_order(waiting, candidates, shares, taken):
            size = _count_next(waiting[index], taken.get(index, 0))
            if left <= 0 or (size > left and left < budget):
                break
            left -= size
            taken[index] = taken.get(index, 0) + size // waiting[index].num_rows
            shares[waiting[index].client] = shares.get(waiting[index].client, 0.0) + size
    return [Take(index, num_tokens) for index, num_tokens in taken.items()]


def _in_fair_order(
    waiting: Sequence[WaitingStep],
    candidates: Sequence[int],
    shares: Mapping[str, float],
    taken: Mapping[int, int],
) -> Iterator[int]:
    """Yield whose part is next, again and again; in between the caller updates the last two."""
    queues: dict[str, list[int]] = {}
    for index in reversed(candidates):
        queues.setdefault(waiting[index].client, []).append(index)
    heap = [(shares.get(client, 0.0), queue[-1], client) for client, queue in queues.items()]
    heapq.heapify(heap)
    while heap:
        _, index, client = heap[0]
        yield index
        queue = queues[client]
        if taken.get(index, 0) >= waiting[index].num_tokens:
            queue.pop()
        if queue:
            heapq.heapreplace(heap, (shares.get(client, 0.0), queue[-1], client))
        else:
            heapq.heappop(heap)


def _count_next(step: WaitingStep, num_taken: int) -> int:
    """Return the rows times tokens of a step's next part."""
    num_tokens = min(count_part_tokens(step.num_rows), step.num_tokens - num_taken)
    return step.num_rows * num_tokens


def renew_usage(
    usage: Mapping[str, float], waiting: Sequence[WaitingStep], batch: Sequence[Take]
) -> dict[str, float]:
    """Return what every waiting client has had, after a batch.

    Who was away is not owed for it: a client comes in with as much as the least of those that
    wait (start-time fair queueing; Goyal, Vin and Cheng, 1996).

    >>> step = WaitingStep(1, "new", 1, 1, True)
    >>> renew_usage({"old": 90.0}, [step], [Take(0, 1)])
    {'new': 1.0}
    """
    clients = dict.fromkeys(step.client for step in waiting)
    least = min((usage[client] for client in clients if client in usage), default=0.0)
    renewed = {client: max(usage.get(client, least), least) for client in clients}
    for take in batch:
        step = waiting[take.index]
        renewed[step.client] += step.num_rows * take.num_tokens
    return renewed
