"""The beginnings that the rows of a session have in common, which need not be moved.

Tensor suffixes: B rows of the session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CommonPrefixes:
    """For every two rows of a session, how many of their first tokens are known to be the same.

    Beam search copies rows all the time, and copies differ in their newest tokens only: the tokens
    before these need not be copied. Rows that never were copies of each other have none.
    """

    def __init__(self, num_rows: int) -> None:
        self._lengths_BB = np.zeros((num_rows, num_rows), dtype=np.int32)

    def copy(self, length: int) -> CommonPrefixes:
        """Return the same for copies of the first `length` tokens of these rows."""
        twin = CommonPrefixes(len(self._lengths_BB))
        twin._lengths_BB = np.minimum(self._lengths_BB, length)
        return twin

    def truncate(self, length: int) -> None:
        """Note that all rows end at `length`; what follows may differ."""
        np.minimum(self._lengths_BB, length, out=self._lengths_BB)

    def find_first_difference(self, row_map: Sequence[int]) -> int:
        """Return from which token on a row may differ from the one whose place it takes.

        >>> prefixes = CommonPrefixes(2)
        >>> prefixes.find_first_difference([0, 0])
        0
        >>> prefixes.reorder([0, 0], length=100)
        >>> prefixes.find_first_difference([1, 0])
        100
        """
        moved = [row for row, source in enumerate(row_map) if row != source]
        sources = [row_map[row] for row in moved]
        return int(self._lengths_BB[moved, sources].min(initial=np.iinfo(np.int32).max))

    def reorder(self, row_map: Sequence[int], length: int) -> None:
        """Note that new row i is a copy of old row `row_map[i]`, each of `length` tokens."""
        sources = np.asarray(row_map)
        lengths_BB = np.minimum(self._lengths_BB, length)[np.ix_(sources, sources)]
        lengths_BB[sources[:, None] == sources[None, :]] = length
        self._lengths_BB = lengths_BB
