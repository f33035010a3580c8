"""How many blocks of a model the memory of a peer holds, which depends on where they begin."""

from dataclasses import dataclass

import numpy as np

from .supply import Column


@dataclass(frozen=True)
class Room:
    """Memory for blocks, and what each of them takes of it."""

    amount: int
    """A number of blocks; of bytes, if there are `sizes`."""
    sizes: tuple[int, ...] = ()
    """Bytes of each block of the model."""

    def find_stops(self, num_blocks: int) -> Column:
        """Return for each block where the longest span ends that begins there and fits.

        A block that does not fit alone ends where it begins.

        >>> Room(2).find_stops(4).tolist()
        [2, 3, 4, 4]
        >>> Room(7, sizes=(1, 5, 5, 9)).find_stops(4).tolist()
        [2, 2, 3, 3]
        """
        sizes = self.sizes or (1,) * num_blocks
        filled = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        return np.searchsorted(filled, filled[:-1] + self.amount, side="right") - 1
