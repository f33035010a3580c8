"""The parts in which prompts are computed. Their size decides how sums are rounded."""

PART_TOKENS = 64
"""Rows times tokens of one part of a prompt where its size makes a difference: large enough for
torch's attention to be quick."""

SHORT_PART_TOKENS = 16
"""The same where a prompt may be cut anywhere: the least that is worth reading the weights for."""


def count_part_tokens(num_rows: int, part_tokens: int = PART_TOKENS) -> int:
    """Return how many tokens per row make one part of a prompt: a power of two.

    >>> [count_part_tokens(num_rows) for num_rows in (1, 2, 3, 100)]
    [64, 32, 16, 1]
    """
    return 2 ** (max(1, part_tokens // num_rows).bit_length() - 1)
