"""The store of adapters by itself: who pays for one that was given up, and what closing leaves."""

from __future__ import annotations

import pytest
from async_tests import Story, make_decorator
from virtual_time import VirtualClock, run_virtual

from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_store import AdapterStore, KeptAdapter
from shoal.peer.process.config import choose_adapter_bytes
from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.adapters import Manifest

ANNA, BERT, CARL = Tenant("anna"), Tenant("bert"), Tenant("carl")
ONE, OTHER = AdapterId(b"1" * 32), AdapterId(b"2" * 32)
SIZE = 100


def put(
    adapter_store: AdapterStore, name: AdapterId, tenant: Tenant, is_published: bool = False
) -> None:
    adapter_store.reserve(tenant, SIZE)
    kept = KeptAdapter(name, Adapter(1, {}), tenant, SIZE, VirtualClock().now())
    adapter_store.put(kept, is_published)


def held(adapter_store: AdapterStore) -> dict[Tenant, int]:
    return dict(adapter_store.shared._held)


async def run(story: Story) -> None:
    adapter_store = AdapterStore(VirtualClock(), 100 * SIZE)
    await story(adapter_store)
    adapter_store.close()


with_store = make_decorator(run)


@with_store()
async def test_published_adapter_that_is_taken_back_is_paid_for_by_those_who_go_on_with_it(
    adapter_store: AdapterStore,
) -> None:
    put(adapter_store, ONE, ANNA, is_published=True)
    kept = adapter_store.find(ONE, BERT)
    for user in (BERT, CARL, CARL):
        adapter_store.use(kept, user)
    assert held(adapter_store) == {ANNA: SIZE}

    adapter_store.withdraw(ONE, ANNA)
    assert held(adapter_store) == {BERT: SIZE}
    adapter_store.leave(kept, BERT)
    assert held(adapter_store) == {CARL: SIZE}
    adapter_store.leave(kept, CARL)
    assert held(adapter_store) == {CARL: SIZE}
    adapter_store.leave(kept, CARL)
    assert held(adapter_store) == {}


@with_store()
async def test_publisher_who_uses_it_himself_pays_to_the_end(adapter_store: AdapterStore) -> None:
    put(adapter_store, ONE, ANNA, is_published=True)
    kept = adapter_store.find(ONE, ANNA)
    adapter_store.use(kept, BERT)
    adapter_store.use(kept, ANNA)
    adapter_store.withdraw(ONE, ANNA)
    assert held(adapter_store) == {ANNA: SIZE}
    adapter_store.leave(kept, ANNA)
    assert held(adapter_store) == {BERT: SIZE}
    adapter_store.leave(kept, BERT)
    assert held(adapter_store) == {}


@with_store()
async def test_copy_that_was_fetched_for_a_client_is_none_that_it_has_brought(
    adapter_store: AdapterStore,
) -> None:
    adapter_store.reserve(ANNA, SIZE)
    copy = KeptAdapter(ONE, Adapter(1, {}), ANNA, SIZE, 0.0, until=100.0)
    adapter_store.put(copy, is_published=True)
    assert adapter_store.find(ONE, ANNA) is copy
    assert not adapter_store.has(ONE, ANNA, is_published=True)

    put(adapter_store, OTHER, ANNA, is_published=True)
    assert adapter_store.has(OTHER, ANNA, is_published=True)


@with_store()
async def test_publication_that_comes_after_closing_is_not_announced(
    adapter_store: AdapterStore,
) -> None:
    changes: list[bool] = []
    adapter_store.on_change = lambda: changes.append(True)
    manifest = Manifest(b"{}", ())
    for name, num_changes in ((ONE, 1), (OTHER, 1)):
        adapter_store.reserve(ANNA, SIZE)
        kept = KeptAdapter(name, Adapter(1, {}), ANNA, SIZE, 0.0, manifest=manifest)
        adapter_store.put(kept, is_published=True)
        assert len(changes) == num_changes
        adapter_store.close()
    assert held(adapter_store) == {}


@with_store()
async def test_each_of_two_publishers_pays_and_takes_back_for_himself(
    adapter_store: AdapterStore,
) -> None:
    for tenant in (ANNA, BERT):
        put(adapter_store, ONE, tenant, is_published=True)
    assert held(adapter_store) == {ANNA: SIZE, BERT: SIZE}
    adapter_store.withdraw(ONE, ANNA)
    adapter_store.withdraw(ONE, CARL)
    assert adapter_store.find(ONE, CARL).tenant == BERT
    adapter_store.withdraw(ONE, BERT)
    with pytest.raises(RefusedError):
        adapter_store.find(ONE, CARL)
    assert held(adapter_store) == {}


@with_store()
async def test_whoever_takes_up_an_adapter_that_was_forgotten_meanwhile_pays_for_it(
    adapter_store: AdapterStore,
) -> None:
    """Between the two, a session may wait for its cache."""

    put(adapter_store, ONE, ANNA)
    kept = adapter_store.find(ONE, ANNA)
    adapter_store.withdraw(ONE, ANNA)
    assert held(adapter_store) == {}
    adapter_store.use(kept, ANNA)
    assert held(adapter_store) == {ANNA: SIZE}
    adapter_store.leave(kept, ANNA)
    assert held(adapter_store) == {}


def test_closed_store_keeps_what_somebody_holds_until_it_is_let_go() -> None:
    async def main() -> None:
        adapter_store = AdapterStore(VirtualClock(), 100 * SIZE)
        put(adapter_store, ONE, ANNA)
        put(adapter_store, OTHER, ANNA)
        kept = adapter_store.find(ONE, ANNA)
        adapter_store.use(kept, ANNA)
        adapter_store.reserve(BERT, SIZE)  # of one that is read at this moment

        adapter_store.close()

        assert len(adapter_store) == 0
        assert held(adapter_store) == {ANNA: SIZE, BERT: SIZE}
        late = KeptAdapter(OTHER, Adapter(1, {}), BERT, SIZE, VirtualClock().now())
        adapter_store.put(late, is_published=False)
        adapter_store.leave(kept, ANNA)
        assert (len(adapter_store), held(adapter_store)) == (0, {})
        assert adapter_store._timer is None

    run_virtual(main())


def refuse(adapter_store: AdapterStore, tenant: Tenant, num_bytes: int) -> tuple[str, float | None]:
    with pytest.raises(RefusedError) as refusal:
        adapter_store.reserve(tenant, num_bytes)
    assert refusal.value.code is ErrorCode.NO_ROOM_FOR_ADAPTER
    return str(refusal.value), refusal.value.retry_after_seconds


def test_who_finds_no_room_hears_how_much_is_in_use_and_what_helps() -> None:
    mib = 2**20
    adapter_store = AdapterStore(VirtualClock(), 16 * mib)

    said, seconds = refuse(adapter_store, ANNA, 10 * mib)
    assert "the adapter takes 10.0 MiB, and this peer accepts at most 9.0 MiB per client" in said
    assert "use a lower rank or fewer target modules" in said
    assert seconds is None

    adapter_store.reserve(ANNA, 5 * mib)
    said, seconds = refuse(adapter_store, ANNA, 4_995_281)
    assert (
        "no memory for an adapter of 4.8 MiB at present: your adapters take 5.0 MiB of your 9.0 MiB"
        in said
    )
    assert "withdraw a published adapter, use a published one by its digest" in said
    assert seconds is not None

    adapter_store.reserve(BERT, 4 * mib)
    said, seconds = refuse(adapter_store, CARL, 5 * mib)
    assert "no memory for an adapter of 5.0 MiB at present: others leave you 3.9 MiB" in said
    assert "withdraw" not in said
    assert seconds is not None


@with_store()
async def test_adapter_stays_while_there_is_no_room_for_what_replaces_it(
    adapter_store: AdapterStore,
) -> None:
    put(adapter_store, ONE, ANNA)
    adapter_store.reserve(BERT, 30 * SIZE)
    with pytest.raises(RefusedError):
        adapter_store.reserve(ANNA, 50 * SIZE, replaces=ONE)
    assert adapter_store.find(ONE, ANNA).num_bytes == SIZE
    assert held(adapter_store) == {ANNA: SIZE, BERT: 30 * SIZE}
    adapter_store.reserve(ANNA, 2 * SIZE, replaces=ONE)
    with pytest.raises(RefusedError):
        adapter_store.find(ONE, ANNA)
    assert held(adapter_store) == {ANNA: 2 * SIZE, BERT: 30 * SIZE}


def test_peer_that_keeps_no_adapters_says_so() -> None:
    adapter_store = AdapterStore(VirtualClock(), 0)
    said, seconds = refuse(adapter_store, ANNA, 1)
    assert said.startswith("this peer accepts no adapters")
    with pytest.raises(RefusedError, match="accepts no adapters") as refusal:
        adapter_store.find(ONE, ANNA)
    assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
    assert seconds is None


@with_store()
async def test_peer_says_of_an_adapter_that_it_does_not_have_no_more_than_it_knows(
    adapter_store: AdapterStore,
) -> None:
    put(adapter_store, ONE, ANNA)
    with pytest.raises(RefusedError) as refusal:
        adapter_store.find(ONE, BERT)
    said = str(refusal.value)
    assert said.startswith("this peer has no adapter 313131313131… that you may use: ")
    assert "nobody" not in said
    assert "its publisher has ended" in said


@pytest.mark.parametrize(
    ("free_bytes", "num_bytes"), [(2**30, 2**26), (2**40, 2**29), (2**28, 2**24), (2**28 - 16, 0)]
)
def test_adapters_have_a_part_of_what_is_free(free_bytes: int, num_bytes: int) -> None:
    assert choose_adapter_bytes(free_bytes) == num_bytes
