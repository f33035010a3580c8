"""Which waiting steps the compute thread takes next: a pure decision."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PASSES = 8
"""Batches that may be made without a waiting step before it goes first."""


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """What the policy may know of a step that waits.

    `session` tells sessions apart: steps of one session never overtake each other. `num_tokens`
    counts rows times tokens, `num_passes` the batches that were made without the step.
    """

    session: int
    num_tokens: int
    is_decoding: bool
    num_passes: int = 0


def choose_batch(waiting: Sequence[WaitingStep], token_budget: int) -> list[int]:
    """Return the indices of the steps to execute together, never empty while something waits.

    `waiting` is in order of arrival. Steps that decode go first, then prompts while the budget
    lasts; only the oldest step of a session is a candidate. The first choice is taken whatever
    its size. Steps that were passed over MAX_PASSES times go before all others, so that neither
    a stream of decode steps nor a large prompt keeps anybody waiting forever: after MAX_PASSES
    batches a step waits at most for those that arrived before it.

    >>> prompt, token = WaitingStep(1, 300, False), WaitingStep(2, 1, True)
    >>> choose_batch([prompt, token], token_budget=64)
    [1]
    >>> choose_batch([prompt, token], token_budget=512)
    [1, 0]
    """
    heads: dict[int, int] = {}
    for index, step in enumerate(waiting):
        heads.setdefault(step.session, index)
    candidates = sorted(heads.values(), key=lambda index: (_rank(waiting[index]), index))
    chosen: list[int] = []
    num_tokens = 0
    for index in candidates:
        num_tokens += waiting[index].num_tokens
        if chosen and num_tokens > token_budget:
            break
        chosen.append(index)
    return chosen


def _rank(step: WaitingStep) -> int:
    if step.num_passes >= MAX_PASSES:
        return 0
    return 1 if step.is_decoding else 2
