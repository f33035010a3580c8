"""Where long computations stop for a moment, so that something urgent gets its turn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_ENDLESS = 2**62


@dataclass(frozen=True)
class Pauses:
    """Calls `give_way` between pieces of work.

    A piece has about `max_products` multiplications and additions. How work is cut never follows
    from how fast it goes: sums would be rounded otherwise each time.
    """

    give_way: Callable[[], object]
    max_products: int

    def cut(self, length: int, products_each: int, multiple: int = 1) -> Iterator[slice]:
        """Yield ranges that cover `length` in order, giving way before each of them.

        Each but the last has a `multiple` of elements, for which so many products are done each.

        >>> list(Pauses(print, max_products=100).cut(70, products_each=5, multiple=16))
        <BLANKLINE>
        <BLANKLINE>
        <BLANKLINE>
        [slice(0, 32, None), slice(32, 64, None), slice(64, 70, None)]
        """
        step = max(1, -(-self.max_products // (products_each * multiple))) * multiple
        for start in range(0, length, step):
            self.give_way()
            yield slice(start, min(start + step, length))


NO_PAUSES = Pauses(lambda: None, _ENDLESS)
"""Everything in one piece."""
