"""Which waiting work the compute thread takes next, and how much of it.

Work is of two kinds. Decoding steps are *urgent*: a user waits for the token. Prompts *fill* the
time in between, and so does the decoding of a client that runs many sessions beside others. If the
cut of a prompt decides its last bits, parts have a fixed size, whatever else is computed: results
do not depend on other clients.

The functions are pure decisions; `IterationBudget` measures what they go by.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .blocks.batch import PART_TOKENS, count_part_tokens

_IDLE_SECONDS = 0.03
"""How long an iteration may be when no session decodes: at every peer a new client waits for one
to open its session, and for another with its first tokens."""

_BLOCK_SECONDS = 0.002
"""How long a block of filling work may take while a session decodes: urgent steps wait for it."""

_RECENT_SECONDS = 0.25
_RECENT_ITERATIONS = 8
"""A session decodes if its last step was within these seconds, or so many iterations."""

_FEW_ROWS = 4
"""The rows that people decode at once; programs decode more."""

_SMOOTHING = 0.2

LEAD_TOKENS = 8192
"""How far ahead of other waiting tenants a tenant's steps may be and still count as urgent: many
decoding rows can take as much time as a prompt."""

DECODED_TOKENS = 8
"""Tokens of a prompt that take about as long as one decoding row, with few rows at a time."""

_NUMBER_BYTES = 4
"""Of an adapter, computed in float32: one takes as long as so many bytes of weights."""


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """A waiting step as the policy sees it.

    Steps of one `session` never overtake each other. `tenant` is an address, and a client there.
    `num_tokens` are the tokens per row that are not computed yet. Each costs `token_cost` times as
    much as one without an adapter.
    """

    session: int
    tenant: tuple[str, str]
    num_rows: int
    num_tokens: int
    is_decoding: bool
    token_cost: float = 1.0

    def count_cost(self, num_tokens: int) -> float:
        """Return what so many tokens per row count for, in tokens of a prompt."""
        cost = self.num_rows * num_tokens * self.token_cost
        return cost * DECODED_TOKENS if self.is_decoding else cost


def count_token_cost(num_numbers: int, num_weight_bytes: int) -> float:
    """Return the cost of a token with an adapter of so many numbers beside weights, see
    `WaitingStep`.

    >>> count_token_cost(100, 1600)
    1.25
    """
    return 1 + num_numbers * _NUMBER_BYTES / num_weight_bytes


_FORGETTING = 1 / 32
"""The fraction of a tenant's lead that each iteration without it forgets. A decoding client misses
some iterations between two tokens, and should not pay for a prompt that was done long ago."""

Usage = Mapping[tuple[str, ...], float]
"""The lead of each address, of each tenant among those of its address, and of each session among
those of its tenant, in tokens of prompts: over the one that had had the least among those that
waited when the last batch was chosen. Missing keys have no lead."""


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """The next `num_tokens` tokens per row of the waiting step at `index`."""

    index: int
    num_tokens: int


def choose_urgent(
    waiting: Sequence[WaitingStep],
    usage: Usage,
    token_budget: int,
    crowding: Collection[tuple[str, str]] = (),
    running: Sequence[WaitingStep] = (),
) -> list[ScheduledPart]:
    """Return the steps for which all other work has to wait, up to the cost of `token_budget` rows.

    `waiting` is in order of arrival; only the oldest step of a session is a candidate, and only if
    the session has none that is `running`. Decoding steps are urgent, except those of two kinds of
    tenants: a `crowding` tenant decodes many rows beside others that decode few, and would make
    their iterations many times as long; a tenant that leads by more than LEAD_TOKENS lets the
    others catch up.

    >>> prompt = WaitingStep(1, ("home", "a"), 1, 300, False)
    >>> token = WaitingStep(2, ("home", "b"), 1, 1, True)
    >>> choose_urgent([prompt, token], {}, 512)
    [ScheduledPart(index=1, num_tokens=1)]
    """
    urgent = _find_urgent(waiting, usage, crowding, running)
    taken: dict[int, int] = {}
    _share_out(token_budget, waiting, urgent, PART_TOKENS, dict(usage), taken)
    return [ScheduledPart(index, num_tokens) for index, num_tokens in taken.items()]


def choose_batch(
    waiting: Sequence[WaitingStep],
    usage: Usage,
    token_budget: int,
    filling_budget: int,
    part_tokens: int = PART_TOKENS,
    crowding: Collection[tuple[str, str]] = (),
) -> list[ScheduledPart]:
    """Return what to compute together: urgent steps, and filling work.

    The urgent steps are those of `choose_urgent`. Filling work comes along up to `filling_budget`,
    in tokens of prompts: parts of prompts, and decoding steps that are not urgent. Each budget goes
    to the address that has had the least so far, there to the client with the least, and to its
    session with the least: no client starves, made-up names bring nothing, and a short prompt does
    not wait for a long one of the same client. The first part is taken whatever its size.

    >>> prompt = WaitingStep(1, ("home", "a"), 1, 300, False)
    >>> token = WaitingStep(2, ("home", "b"), 1, 1, True)
    >>> choose_batch([prompt, token], {}, 512, 128)
    [ScheduledPart(index=1, num_tokens=1), ScheduledPart(index=0, num_tokens=128)]
    """
    urgent = _find_urgent(waiting, usage, crowding, ())
    filling = [index for index in _find_heads(waiting, ()) if index not in set(urgent)]
    shares = dict(usage)
    taken: dict[int, int] = {}
    _share_out(token_budget, waiting, urgent, part_tokens, shares, taken)
    _share_out(filling_budget, waiting, filling, part_tokens, shares, taken, by_cost=True)
    return [ScheduledPart(index, num_tokens) for index, num_tokens in taken.items()]


def choose_next(waiting: Sequence[WaitingStep], usage: Usage) -> int | None:
    """Return whose turn it is, where one step is taken as a whole; None if none waits.

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
        and waiting[index].tenant not in crowding
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

    The budget counts rows times tokens without adapters, or, `by_cost`, tokens of a prompt, as many
    as take as long.
    The chosen parts are added to `taken`, their cost to the `shares`.
    """
    left: float = budget
    for index in _in_fair_order(waiting, candidates, shares, taken):
        step = waiting[index]
        num_tokens = _count_next(step, taken.get(index, 0), part_tokens)
        cost = step.count_cost(num_tokens)
        needed = cost if by_cost else step.num_rows * num_tokens * step.token_cost
        if left <= 0 or (needed > left and left < budget):
            break
        left -= needed
        taken[index] = taken.get(index, 0) + num_tokens
        for key in _keys_of(step):
            shares[key] = shares.get(key, 0.0) + cost


def _is_far_ahead(step: WaitingStep, usage: Usage, least: Usage) -> bool:
    address, client, _ = _keys_of(step)
    return any(
        usage.get(key, 0.0) - least.get(key[:-1], 0.0) > LEAD_TOKENS for key in (address, client)
    )


def _find_least(usage: Usage, waiting: Iterable[WaitingStep]) -> dict[tuple[str, ...], float]:
    """Return the least usage among those that wait beside each other, by their common key."""
    least: dict[tuple[str, ...], float] = {}
    for key in {key for step in waiting for key in _keys_of(step)}:
        used = usage.get(key, 0.0)
        least[key[:-1]] = min(used, least.get(key[:-1], used))
    return least


def _keys_of(step: WaitingStep) -> tuple[tuple[str, ...], ...]:
    """Return the keys of a step's usage: its address, its tenant and its session."""
    return step.tenant[:1], step.tenant, (*step.tenant, str(step.session))


def _in_fair_order(
    waiting: Sequence[WaitingStep],
    candidates: Sequence[int],
    shares: Usage,
    taken: Mapping[int, int],
    depth: int = 0,
) -> Iterator[int]:
    """Yield whose part is next, again and again; in between the caller updates the last two.

    Addresses take turns, at each its tenants (`depth` 1), and of each its sessions.
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
    """Return the tokens per row of a step's next part."""
    part = count_part_tokens(step.num_rows, part_tokens)
    return min(part, step.num_tokens - num_taken)


def renew_usage(
    usage: Usage, waiting: Sequence[WaitingStep], batch: Sequence[ScheduledPart]
) -> dict[tuple[str, ...], float]:
    """Return all leads after a batch.

    Absence earns nothing: a new tenant starts with the least of those that wait beside it
    (start-time fair queueing; Goyal, Vin and Cheng, 1996). The lead of an absent tenant is
    remembered, and fades until others have caught up.

    >>> step = WaitingStep(1, ("home", "new"), 1, 1, True)
    >>> renew_usage({("home",): 90.0, ("home", "old"): 64.0}, [step], [ScheduledPart(0, 1)])
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
    for part in batch:
        step = waiting[part.index]
        for key in _keys_of(step):
            renewed[key] += step.count_cost(part.num_tokens)
    return renewed


class _DecodingSessions:
    """The sessions that had a step recently, and their rows."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[tuple[str, str], int], tuple[float, float]] = {}

    def note(self, now: float, tenant: tuple[str, str], session: int, num_rows: float) -> None:
        self._sessions.pop((tenant, session), None)
        self._sessions[tenant, session] = now, num_rows

    def forget(self, before: float) -> None:
        """Forget sessions whose last step was before a time; the first are the oldest."""
        for key, (noted_at, _) in list(self._sessions.items()):
            if noted_at >= before:
                break
            del self._sessions[key]

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def count_rows(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """Return the rows of each address and of each tenant."""
        addresses: defaultdict[str, float] = defaultdict(float)
        tenants: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (tenant, _), (_, num_rows) in self._sessions.items():
            addresses[tenant[0]] += num_rows
            tenants[tenant] += num_rows
        return addresses, tenants


class IterationBudget:
    """Measures iterations, and says how much filling work the next one carries, and for how long.

    Times are monotonic seconds. Urgent steps interrupt filling work between two blocks. After they
    have taken some time, filling work gets as much before it has to give way again: at worst both
    are half as fast.
    """

    def __init__(self, token_budget: int, least_tokens: int, num_blocks: int) -> None:
        self._token_budget = token_budget
        self._least_tokens = least_tokens
        self._shared_seconds = min(_IDLE_SECONDS, num_blocks * _BLOCK_SECONDS)
        self._decode_seconds = 0.0
        self._token_seconds = 0.0
        self.iteration_seconds = 0.0
        """How long recent iterations took; 0 before the first."""
        self._decoding = _DecodingSessions()
        self._owed_seconds = 0.0
        self._filling_since = 0.0

    @property
    def is_filling_owed(self) -> bool:
        """Whether it is the turn of filling work, even if urgent steps wait."""
        return self._owed_seconds > 0

    def note_decoding(
        self, now: float, tenant: tuple[str, str], session: int, num_rows: float
    ) -> None:
        """Note that a decoding step has arrived, or was computed. A row with an adapter counts as
        many as cost the same without.
        """
        self._decoding.note(now, tenant, session, num_rows)

    def find_crowding(self, now: float) -> set[tuple[str, str]]:
        """Return the tenants that decode many rows beside others that decode few.

        Client names cost nothing: beside another address, all clients of one address count as one.
        """
        self._forget(now)
        addresses, tenants = self._decoding.count_rows()
        few_of_address = min(addresses.values(), default=0) <= _FEW_ROWS
        few_of_tenant = min(tenants.values(), default=0) <= _FEW_ROWS
        return {
            tenant
            for tenant, num_rows in tenants.items()
            if (few_of_tenant and num_rows > _FEW_ROWS)
            or (few_of_address and addresses[tenant[0]] > _FEW_ROWS)
        }

    def choose_num_tokens(self, now: float) -> int:
        """Return how many tokens of prompts, or as much else, fill the next iteration."""
        if not self._token_seconds:
            return self._least_tokens
        seconds = _IDLE_SECONDS
        self._forget(now)
        if self._decoding:
            seconds = max(self._shared_seconds, min(self._decode_seconds, _IDLE_SECONDS))
        num_tokens = int(seconds / self._token_seconds)
        return max(self._least_tokens, min(num_tokens, self._token_budget))

    def begin_filling(self, now: float) -> None:
        """Note the start of an iteration that gives way to urgent steps."""
        self._filling_since = now

    def must_give_way(self, now: float) -> bool:
        """Return whether this iteration has had its time, and stops for urgent steps."""
        return now - self._filling_since >= self._owed_seconds

    def note_iteration(
        self, now: float, seconds: float, num_urgent: int, num_filling: float
    ) -> None:
        """Note an iteration that ended now, and how long it took without interruptions.

        It carried `num_urgent` urgent steps, and filling work of `num_filling` tokens.
        """
        self.iteration_seconds = _smooth(self.iteration_seconds, seconds)
        if num_filling == 0:
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
            self._owed_seconds, self._filling_since = seconds, now
            return
        self._owed_seconds = 0.0  # both kinds had a turn
        if num_urgent == 0 or self._decode_seconds:
            rest = max(seconds - (self._decode_seconds if num_urgent else 0.0), 0.0)
            self._token_seconds = _smooth(self._token_seconds, rest / num_filling)

    def _forget(self, now: float) -> None:
        recent = max(_RECENT_SECONDS, _RECENT_ITERATIONS * self.iteration_seconds)
        self._decoding.forget(now - recent)


def _smooth(average: float, value: float) -> float:
    return average + _SMOOTHING * (value - average) if average else value
