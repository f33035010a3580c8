"""What is imported is looked through for garbage neither meanwhile nor afterwards."""

import gc
from collections.abc import Iterator

import pytest

from shoal.cli.heavy_imports import importing_much
from shoal.cli.text_generation import import_client


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leaves garbage collection as it was before."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


def test_what_is_made_inside_is_out_of_reach_and_collection_goes_on_afterwards() -> None:
    with importing_much():
        assert not gc.isenabled()
        made: list[object] = [[]]
    assert gc.isenabled()
    assert all(each is not made for each in gc.get_objects())


def test_failed_import_leaves_collection_as_it_was() -> None:
    with pytest.raises(ImportError), importing_much():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_nothing_is_left_alone() -> None:
    gc.disable()
    with importing_much():
        pass
    assert not gc.isenabled()


def test_client_is_imported_so() -> None:
    assert gc.get_freeze_count() == 0
    import_client()
    assert gc.get_freeze_count() > 100_000
