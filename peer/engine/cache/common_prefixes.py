"""How much of their past the rows of a session have in common: pure bookkeeping of beam search.

Beams fork all the time, yet differ in their newest tokens only. Who knows where two rows part
need not copy what lies before.
"""

from collections.abc import Sequence

import numpy as np


class CommonPrefixes:
    """For every two rows of a session, how many of their first tokens are known to be the same.

    That is known of rows which once were copies of each other; of others, nothing is.
    """

    def __init__(self, num_rows: int) -> None:
        self._lengths_BB = np.zeros((num_rows, num_rows), dtype=np.int32)

    def copy(self, length: int) -> "CommonPrefixes":
        """Return what is known of the first `length` tokens, for rows that are copies of these."""
        twin = CommonPrefixes(len(self._lengths_BB))
        twin._lengths_BB = np.minimum(self._lengths_BB, length)
        return twin

    def truncate(self, length: int) -> None:
        """Note that all rows end at `length`, for whatever follows there may differ."""
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
