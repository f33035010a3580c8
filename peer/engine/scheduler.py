"""Which waiting steps the compute thread takes next: a pure decision."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """What the policy may know of a step that waits.

    `session` tells sessions apart: steps of one session never overtake each other. `num_tokens`
    counts rows times tokens.
    """

    session: int
    num_tokens: int
    is_decoding: bool


def choose_batch(waiting: Sequence[WaitingStep], token_budget: int) -> list[int]:
    """Return the indices of the steps to execute together, never empty while something waits.

    Steps that decode go first, in order of arrival, then prompts while the budget lasts; only
    the oldest step of a session is a candidate. The first choice is taken whatever its size, so
    that a prompt larger than the budget is not left waiting forever.

    >>> prompt, token = WaitingStep(1, 300, False), WaitingStep(2, 1, True)
    >>> choose_batch([prompt, token], token_budget=64)
    [1]
    >>> choose_batch([prompt, token], token_budget=512)
    [1, 0]
    """
    heads: dict[int, int] = {}
    for index, step in enumerate(waiting):
        heads.setdefault(step.session, index)
    candidates = sorted(heads.values(), key=lambda index: (not waiting[index].is_decoding, index))
    chosen: list[int] = []
    num_tokens = 0
    for index in candidates:
        num_tokens += waiting[index].num_tokens
        if chosen and num_tokens > token_budget:
            break
        chosen.append(index)
    return chosen
