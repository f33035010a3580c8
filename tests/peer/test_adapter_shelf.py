"""The shelf of adapters by itself: who pays for one that was given up, and what closing leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.peer.adapter_budget import choose_adapter_bytes
from shoal.peer.adapter_shelf import AdapterShelf
from shoal.peer.engine.adapters import Adapter
from shoal.protocol.errors import RefusedError
from shoal.protocol.fair_share import Holder
from shoal.protocol.ids import AdapterId
from shoal.protocol.net.clock import VirtualClock, run_virtual

ANNA, BERT, CARL = Holder("anna"), Holder("bert"), Holder("carl")
ONE, OTHER = AdapterId(b"1" * 32), AdapterId(b"2" * 32)
SIZE = 100


def put(shelf: AdapterShelf, name: AdapterId, holder: Holder, is_published: bool = False) -> None:
    shelf.reserve(holder, SIZE)
    shelf.put(name, Adapter(1, {}), holder, SIZE, is_published)


def held(shelf: AdapterShelf) -> dict[Holder, int]:
    return dict(shelf.shared._held)


def run(test: Callable[[AdapterShelf], None]) -> None:
    async def main() -> None:
        shelf = AdapterShelf(VirtualClock(), 100 * SIZE)
        test(shelf)
        shelf.close()

    run_virtual(main())


def test_published_adapter_that_is_taken_back_is_paid_for_by_those_who_go_on_with_it() -> None:
    def test(shelf: AdapterShelf) -> None:
        put(shelf, ONE, ANNA, is_published=True)
        kept = shelf.find(ONE, BERT)
        for user in (BERT, CARL, CARL):
            shelf.use(kept, user)
        assert held(shelf) == {ANNA: SIZE}

        shelf.withdraw(ONE, ANNA)
        assert held(shelf) == {BERT: SIZE}
        shelf.leave(kept, BERT)
        assert held(shelf) == {CARL: SIZE}
        shelf.leave(kept, CARL)
        assert held(shelf) == {CARL: SIZE}
        shelf.leave(kept, CARL)
        assert held(shelf) == {}

    run(test)


def test_publisher_who_uses_it_himself_pays_to_the_end() -> None:
    def test(shelf: AdapterShelf) -> None:
        put(shelf, ONE, ANNA, is_published=True)
        kept = shelf.find(ONE, ANNA)
        shelf.use(kept, BERT)
        shelf.use(kept, ANNA)
        shelf.withdraw(ONE, ANNA)
        assert held(shelf) == {ANNA: SIZE}
        shelf.leave(kept, ANNA)
        assert held(shelf) == {BERT: SIZE}
        shelf.leave(kept, BERT)
        assert held(shelf) == {}

    run(test)


def test_each_of_two_publishers_pays_and_takes_back_for_himself() -> None:
    def test(shelf: AdapterShelf) -> None:
        for holder in (ANNA, BERT):
            put(shelf, ONE, holder, is_published=True)
        assert held(shelf) == {ANNA: SIZE, BERT: SIZE}
        shelf.withdraw(ONE, ANNA)
        shelf.withdraw(ONE, CARL)
        assert shelf.find(ONE, CARL).holder == BERT
        shelf.withdraw(ONE, BERT)
        with pytest.raises(RefusedError):
            shelf.find(ONE, CARL)
        assert held(shelf) == {}

    run(test)


def test_whoever_takes_up_an_adapter_that_was_forgotten_meanwhile_pays_for_it() -> None:
    """Between the two, a session may wait for its cache."""

    def test(shelf: AdapterShelf) -> None:
        put(shelf, ONE, ANNA)
        kept = shelf.find(ONE, ANNA)
        shelf.give_up(ONE, ANNA)
        assert held(shelf) == {}
        shelf.use(kept, ANNA)
        assert held(shelf) == {ANNA: SIZE}
        shelf.leave(kept, ANNA)
        assert held(shelf) == {}

    run(test)


def test_closed_shelf_keeps_what_somebody_holds_until_it_is_let_go() -> None:
    async def main() -> None:
        shelf = AdapterShelf(VirtualClock(), 100 * SIZE)
        put(shelf, ONE, ANNA)
        put(shelf, OTHER, ANNA)
        kept = shelf.find(ONE, ANNA)
        shelf.use(kept, ANNA)
        shelf.reserve(BERT, SIZE)  # of one that is read at this moment

        shelf.close()

        assert len(shelf) == 0
        assert held(shelf) == {ANNA: SIZE, BERT: SIZE}
        shelf.put(OTHER, Adapter(1, {}), BERT, SIZE, is_published=False)
        shelf.leave(kept, ANNA)
        assert (len(shelf), held(shelf)) == (0, {})
        assert shelf._timer is None

    run_virtual(main())


@pytest.mark.parametrize(
    ("free_bytes", "num_bytes"), [(2**30, 2**26), (2**40, 2**29), (2**28, 2**24), (2**28 - 16, 0)]
)
def test_adapters_have_a_part_of_what_is_free(free_bytes: int, num_bytes: int) -> None:
    assert choose_adapter_bytes(free_bytes) == num_bytes
