"""Which waiting work the compute thread takes next: pure decisions.

Work is of two kinds. Steps that decode are *urgent*: somebody waits for the token. Prompts *fill*
the time in between, and so does what one client decodes in many sessions beside others. Where it
matters to the last bit how a prompt is cut, parts are of a fixed size, whatever else goes on: so
nobody's results depend on the company.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .blocks.prompt_parts import PART_TOKENS, count_part_tokens

LEAD_TOKENS = 8192
"""How much more than others who wait somebody may have had and still be urgent: many rows that
decode can take as much time as a prompt."""

DECODED_TOKENS = 8
"""Tokens of a prompt that take about as long as a row that decodes, with few rows at a time."""


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """What the policy may know of a step that waits.

    `session` tells sessions apart: steps of one session never overtake each other. `holder` is
    whose it is: an address, and a client there. `num_tokens` are the tokens per row that are not
    computed yet.
    """

    session: int
    holder: tuple[str, str]
    num_rows: int
    num_tokens: int
    is_decoding: bool


_FORGETTING = 1 / 32
"""The part of what somebody is ahead by that an iteration without him forgets. Who decodes misses
some between two tokens, and should not pay for a prompt that is done for long."""

Usage = Mapping[tuple[str, ...], float]
"""Tokens of prompts, or as much, by which each address, each holder beside others of its address
and each session beside others of its holder is ahead: of the one that waited and had had the least
when the last batch was chosen. Who is not in it is not ahead."""


@dataclass(frozen=True, slots=True)
class Take:
    """The next `num_tokens` tokens per row of the waiting step at `index`."""

    index: int
    num_tokens: int


def choose_urgent(
    waiting: Sequence[WaitingStep],
    usage: Usage,
    token_budget: int,
    crowding: Collection[tuple[str, str]] = (),
    running: Sequence[WaitingStep] = (),
) -> list[Take]:
    """Return the steps for which everything else has to wait, up to `token_budget` rows.

    `waiting` is in order of arrival; only the oldest step of a session is a candidate, and only if
    the session has none that is `running`. Steps that decode are urgent, except those of two kinds
    of holders. Who is `crowding`, decoding many rows beside others who decode few, would make their
    iterations many times as long. And who is ahead of others by more than LEAD_TOKENS has to let
    them catch up.

    >>> prompt = WaitingStep(1, ("home", "a"), 1, 300, False)
    >>> token = WaitingStep(2, ("home", "b"), 1, 1, True)
    >>> choose_urgent([prompt, token], {}, 512)
    [Take(index=1, num_tokens=1)]
    """
    urgent = _find_urgent(waiting, usage, crowding, running)
    taken: dict[int, int] = {}
    _share_out(token_budget, waiting, urgent, PART_TOKENS, dict(usage), taken)
    return [Take(index, num_tokens) for index, num_tokens in taken.items()]


def choose_batch(
    waiting: Sequence[WaitingStep],
    usage: Usage,
    token_budget: int,
    filling_budget: int,
    part_tokens: int = PART_TOKENS,
    crowding: Collection[tuple[str, str]] = (),
) -> list[Take]:
    """Return what to compute together: what is urgent, and what fills.

    The first is what `choose_urgent` returns. Everything else comes along up to `filling_budget`,
    which counts tokens of prompts: prompts in parts, and what is decoded without being urgent. Each
    budget is shared out to the address that has had the least so far, there to the client and of
    its sessions to the one that has: so nobody is passed over for ever, nobody gets more by making
    up names, and a short prompt does not wait for a long one of the same client. The first part is
    taken whatever its size.

    >>> prompt = WaitingStep(1, ("home", "a"), 1, 300, False)
    >>> token = WaitingStep(2, ("home", "b"), 1, 1, True)
    >>> choose_batch([prompt, token], {}, 512, 128)
    [Take(index=1, num_tokens=1), Take(index=0, num_tokens=128)]
    """
    urgent = _find_urgent(waiting, usage, crowding, ())
    filling = [index for index in _find_heads(waiting, ()) if index not in set(urgent)]
    shares = dict(usage)
    taken: dict[int, int] = {}
    _share_out(token_budget, waiting, urgent, part_tokens, shares, taken)
    _share_out(filling_budget, waiting, filling, part_tokens, shares, taken, by_cost=True)
    return [Take(index, num_tokens) for index, num_tokens in taken.items()]


def choose_next(waiting: Sequence[WaitingStep], usage: Usage) -> int | None:
    """Return whose turn it is among those of which one is taken as a whole; None if nobody waits.

    >>> waiting = [WaitingStep(1, ("a", ""), 1, 9, False), WaitingStep(2, ("b", ""), 1, 9, False)]
    >>> choose_next(waiting, {("a",): 5.0})
    1
    """
    return next(_in_fair_order(waiting, range(len(waiting)), usage, {}), None)


def _find_heads(waiting: Sequence[WaitingStep], running: Sequence[WaitingStep]) -> list[int]:
    """Return the oldest step of each session that has none running."""
    busy = {step.session for step in running}
    heads: dict[int, int] = {}
    for index, step in enumerate(waiting):
        if step.session not in busy:
            heads.setdefault(step.session, index)
    return list(heads.values())


def _find_urgent(
    waiting: Sequence[WaitingStep],
    usage: Usage,
    crowding: Collection[tuple[str, str]],
    running: Sequence[WaitingStep],
) -> list[int]:
    least = _find_least(usage, [*waiting, *running])
    return [
        index
        for index in _find_heads(waiting, running)
        if waiting[index].is_decoding
        and waiting[index].holder not in crowding
        and not _is_far_ahead(waiting[index], usage, least)
    ]


def _share_out(
    budget: int,
    waiting: Sequence[WaitingStep],
    candidates: Sequence[int],
    part_tokens: int,
    shares: dict[tuple[str, ...], float],
    taken: dict[int, int],
    by_cost: bool = False,
) -> None:
    """Take parts of the candidates in fair order while the budget lasts.

    The budget counts rows times tokens, or, `by_cost`, as many tokens of a prompt as take as long.
    What is taken is added to `taken`, what it cost to the `shares`.
    """
    left = budget
    for index in _in_fair_order(waiting, candidates, shares, taken):
        step = waiting[index]
        size = _count_next(step, taken.get(index, 0), part_tokens)
        cost = count_cost(size, step.is_decoding)
        needed = cost if by_cost else size
        if left <= 0 or (needed > left and left < budget):
            break
        left -= needed
        taken[index] = taken.get(index, 0) + size // step.num_rows
        for key in _keys_of(step):
            shares[key] = shares.get(key, 0.0) + cost


def _is_far_ahead(step: WaitingStep, usage: Usage, least: Usage) -> bool:
    address, client, _ = _keys_of(step)
    return any(
        usage.get(key, 0.0) - least.get(key[:-1], 0.0) > LEAD_TOKENS for key in (address, client)
    )


def _find_least(usage: Usage, waiting: Iterable[WaitingStep]) -> dict[tuple[str, ...], float]:
    """Return the least that any of those had who wait beside each other, by what they share."""
    least: dict[tuple[str, ...], float] = {}
    for key in {key for step in waiting for key in _keys_of(step)}:
        used = usage.get(key, 0.0)
        least[key[:-1]] = min(used, least.get(key[:-1], used))
    return least


def _keys_of(step: WaitingStep) -> tuple[tuple[str, ...], ...]:
    """Return under what a step counts: its address, its holder and its session."""
    return step.holder[:1], step.holder, (*step.holder, str(step.session))


def _in_fair_order(
    waiting: Sequence[WaitingStep],
    candidates: Sequence[int],
    shares: Usage,
    taken: Mapping[int, int],
    depth: int = 0,
) -> Iterator[int]:
    """Yield whose part is next, again and again; in between the caller updates the last two.

    Addresses take turns, at each its holders (`depth` 1), and of each its sessions.
    """
    if depth == 3:
        for index in candidates:
            while taken.get(index, 0) < waiting[index].num_tokens:
                yield index
        return
    groups: dict[tuple[str, ...], list[int]] = {}
    for index in candidates:
        groups.setdefault(_keys_of(waiting[index])[depth], []).append(index)
    heap = [(shares.get(key, 0.0), group[0], key) for key, group in groups.items()]
    turns = {
        key: _in_fair_order(waiting, group, shares, taken, depth + 1)
        for key, group in groups.items()
    }
    heapq.heapify(heap)
    while heap:
        _, first, key = heap[0]
        index = next(turns[key], None)
        if index is None:
            heapq.heappop(heap)
            continue
        yield index
        heapq.heapreplace(heap, (shares.get(key, 0.0), first, key))


def _count_next(step: WaitingStep, num_taken: int, part_tokens: int) -> int:
    """Return the rows times tokens of a step's next part."""
    part = count_part_tokens(step.num_rows, part_tokens)
    num_tokens = min(part, step.num_tokens - num_taken)
    return step.num_rows * num_tokens


def count_cost(size: int, is_decoding: bool) -> int:
    """Return what rows times tokens of a step count for, in tokens of a prompt."""
    return size * DECODED_TOKENS if is_decoding else size


def renew_usage(
    usage: Usage, waiting: Sequence[WaitingStep], batch: Sequence[Take]
) -> dict[tuple[str, ...], float]:
    """Return by how much everybody is ahead, after a batch.

    Who was away is not owed for it: one comes in with as much as the least of those that wait
    beside it (start-time fair queueing; Goyal, Vin and Cheng, 1996). What one is ahead by is
    remembered while one is away, though less and less, until others have caught up.

    >>> step = WaitingStep(1, ("home", "new"), 1, 1, True)
    >>> renew_usage({("home",): 90.0, ("home", "old"): 64.0}, [step], [Take(0, 1)])
    {('home', 'old'): 62.0, ('home',): 8.0, ('home', 'new'): 8.0, ('home', 'new', '1'): 8.0}
    """
    present = dict.fromkeys(key for step in waiting for key in _keys_of(step))
    least = _find_least(usage, waiting)
    renewed: dict[tuple[str, ...], float] = {}
    for key, ahead in usage.items():
        if key not in present:
            left = ahead * (1 - _FORGETTING) - least.get(key[:-1], 0.0)
            if left >= 1:
                renewed[key] = left
    for key in present:
        renewed[key] = usage.get(key, 0.0) - least[key[:-1]]
    for take in batch:
        step = waiting[take.index]
        for key in _keys_of(step):
            renewed[key] += count_cost(step.num_rows * take.num_tokens, step.is_decoding)
    return renewed
