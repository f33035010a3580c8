"""What is imported is looked through for garbage neither meanwhile nor afterwards."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from shoal.cli.remote_models import opening
from shoal.cli.terminal.heavy_imports import importing_much


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leaves garbage collection as it was before."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


def test_what_is_imported_is_out_of_reach_and_collection_goes_on_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with importing_much():
        assert not gc.isenabled()
        made: list[object] = [[]]
        monkeypatch.setitem(sys.modules, "new_module", ModuleType("new_module"))
    assert gc.isenabled()
    assert all(each is not made for each in gc.get_objects())


def test_nothing_is_kept_where_everything_was_imported_before() -> None:
    with importing_much():
        made: list[object] = [[]]
    assert any(each is made for each in gc.get_objects())


def test_failed_import_leaves_collection_as_it_was() -> None:
    with pytest.raises(ImportError), importing_much():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_nothing_is_left_alone() -> None:
    gc.disable()
    with importing_much():
        pass
    assert not gc.isenabled()


def test_client_is_imported_so(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []

    @contextmanager
    def note() -> Iterator[None]:
        begun.append(True)
        yield

    monkeypatch.setattr(opening, "importing_much", note)
    opening.import_client()
    assert begun
