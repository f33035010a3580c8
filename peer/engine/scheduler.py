"""Which waiting steps the compute thread takes next: a pure decision."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PASSES = 8
"""Batches that may be made without a waiting step before it no longer asks for the budget."""


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
    its size. The oldest of those that were passed over MAX_PASSES times comes along in any case,
    beside the budget: so neither a stream of decode steps nor a flood of prompts keeps anybody
    waiting for longer than MAX_PASSES batches and one for each step that arrived before.

    >>> prompt, token = WaitingStep(1, 300, False), WaitingStep(2, 1, True)
    >>> choose_batch([prompt, token], token_budget=64)
    [1]
    >>> choose_batch([prompt, token], token_budget=512)
    [1, 0]
    """
    heads: dict[int, int] = {}
    for index, step in enumerate(waiting):
        heads.setdefault(step.session, index)
    overdue = [index for index in heads.values() if waiting[index].num_passes >= MAX_PASSES]
    chosen = overdue[:1]
    num_tokens = 0
    for index in sorted(heads.values(), key=lambda index: (not waiting[index].is_decoding, index)):
        if index in overdue[:1]:
            continue
        num_tokens += waiting[index].num_tokens
        if chosen and num_tokens > token_budget:
            break
        chosen.append(index)
    return chosen
