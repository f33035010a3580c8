"""The shelf of adapters by itself: who pays for one that was given up, and what closing leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_shelf import AdapterShelf
from shoal.peer.runtime.config import choose_adapter_bytes
from shoal.protocol.errors import ErrorCode, RefusedError
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


def refuse(shelf: AdapterShelf, holder: Holder, num_bytes: int) -> tuple[str, float | None]:
    with pytest.raises(RefusedError) as refusal:
        shelf.reserve(holder, num_bytes)
    assert refusal.value.code is ErrorCode.NO_ROOM_FOR_ADAPTER
    return str(refusal.value), refusal.value.retry_after_seconds


def test_who_finds_no_room_hears_how_much_is_in_use_and_what_helps() -> None:
    mib = 2**20
    shelf = AdapterShelf(VirtualClock(), 16 * mib)

    said, seconds = refuse(shelf, ANNA, 10 * mib)
    assert "the adapter takes 10.0 MiB, and this peer accepts at most 9.0 MiB per client" in said
    assert "use a lower rank or fewer target modules" in said
    assert seconds is None

    shelf.reserve(ANNA, 5 * mib)
    said, seconds = refuse(shelf, ANNA, 4_995_281)
    assert (
        "no memory for an adapter of 4.8 MiB at present: your adapters take 5.0 MiB of your 9.0 MiB"
        in said
    )
    assert "withdraw a published adapter, use a published one by its digest" in said
    assert seconds is not None

    shelf.reserve(BERT, 4 * mib)
    said, seconds = refuse(shelf, CARL, 5 * mib)
    assert "no memory for an adapter of 5.0 MiB at present: others leave you 3.9 MiB" in said
    assert "withdraw" not in said
    assert seconds is not None


def test_peer_that_keeps_no_adapters_says_so() -> None:
    shelf = AdapterShelf(VirtualClock(), 0)
    said, seconds = refuse(shelf, ANNA, 1)
    assert said.startswith("this peer accepts no adapters")
    with pytest.raises(RefusedError, match="accepts no adapters") as refusal:
        shelf.find(ONE, ANNA)
    assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
    assert seconds is None


def test_peer_says_of_an_adapter_that_it_does_not_have_no_more_than_it_knows() -> None:
    def test(shelf: AdapterShelf) -> None:
        put(shelf, ONE, ANNA)
        with pytest.raises(RefusedError) as refusal:
            shelf.find(ONE, BERT)
        said = str(refusal.value)
        assert said.startswith("this peer has no adapter 313131313131… that you may use. ")
        assert "nobody" not in said
        assert "its publisher is gone" in said

    run(test)


@pytest.mark.parametrize(
    ("free_bytes", "num_bytes"), [(2**30, 2**26), (2**40, 2**29), (2**28, 2**24), (2**28 - 16, 0)]
)
def test_adapters_have_a_part_of_what_is_free(free_bytes: int, num_bytes: int) -> None:
    assert choose_adapter_bytes(free_bytes) == num_bytes
