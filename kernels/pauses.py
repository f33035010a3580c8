"""Pauses in long computations, so that decode steps get their turn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

BYTE_COST = 16
"""The cost of touching a byte, in the units of `Pauses`."""

COST_BETWEEN_PAUSES = 2**29
"""The work that one core does in about 3 milliseconds."""

_ENDLESS = 2**62

GiveWay = Callable[[], object]
"""Called every few milliseconds by a long computation; runs what is urgent, and returns."""


@dataclass(frozen=True)
class Pauses:
    """Calls `give_way` between pieces of work.

    A piece costs about `max_cost`, where each multiplication costs as much as the bytes of the
    numbers that are multiplied: about what it takes on a CPU. How work is cut never follows from
    how fast it goes: sums would be rounded otherwise each time.
    """

    give_way: GiveWay
    max_cost: int

    def cut(self, length: int, cost_each: int, multiple: int = 1) -> Iterator[slice]:
        """Yield ranges that cover `length` in order, giving way before each of them.

        Each but the last has a `multiple` of elements, which cost so much each.

        >>> list(Pauses(print, max_cost=100).cut(70, cost_each=5, multiple=16))
        <BLANKLINE>
        <BLANKLINE>
        <BLANKLINE>
        [slice(0, 32, None), slice(32, 64, None), slice(64, 70, None)]
        """
        step = max(1, -(-self.max_cost // (cost_each * multiple))) * multiple
        for start in range(0, length, step):
            self.give_way()
            yield slice(start, min(start + step, length))


NO_PAUSES = Pauses(lambda: None, _ENDLESS)
"""Everything in one piece."""
