"""Attention of prompts over the caches of their sessions, all tokens of a step in one call.

Takes and writes what `token_attention` does, and attends with many queries at a time. A token's
result depends on its session's tokens up to itself alone: it is the same to the bit however the
prompt was cut into steps, beside whatever company, and on every instruction set. It differs from
that of `token_attention` in the last digits, since sums are taken in another order.
"""

from functools import cache

from ..native.library import load_library
from .token_attention import TokenAttention, TokenShape


@cache
def list_prompt_instruction_sets() -> dict[str, int]:
    """Return those of this processor by name, fastest first; none without the library."""
    library = load_library()
    if library is None:
        return {}
    numbers = {"avx512": 2, "avx2": 1, "portable": 0}
    return {
        name: number
        for name, number in numbers.items()
        if library.shoal_prompt_attention_has(number)
    }


@cache
def choose_prompt_instruction_set() -> int | None:
    """Return the fastest instruction set; None without the library, or where torch is faster."""
    library = load_library()
    number = -1 if library is None else library.shoal_prompt_attention_choose()
    return None if number < 0 else number


def can_attend_prompts(shape: TokenShape) -> bool:
    """Return whether blocks of this shape should be computed here."""
    return shape.is_small and choose_prompt_instruction_set() is not None


class PromptAttention(TokenAttention):
    """One block's attention of prompts; called like that of tokens, with segments of prompts."""

    function = "shoal_prompt_attention_attend"
    choose = staticmethod(choose_prompt_instruction_set)
