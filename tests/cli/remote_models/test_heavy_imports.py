"""What is imported is looked through for garbage neither meanwhile nor afterwards."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import warm_python

import shoal.client
from shoal.cli.terminal.heavy_imports import importing_much


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leaves garbage collection as it was before."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()  # without a collection, which would look at all that was ever imported


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


def test_client_is_imported_so() -> None:
    program = """
import gc, sys
import shoal.client.model.causal_lm, shoal.client.runtime.client
from shoal.cli.remote_models.opening import import_client

# A process that has imported everything forgets two modules, rather than import all others again.
gc.unfreeze()
del sys.modules["shoal.client.model.causal_lm"], shoal.client.model.causal_lm
del sys.modules["shoal.client.runtime.client"], shoal.client.runtime.client
import_client()
print({"shoal.client.model.causal_lm", "shoal.client.runtime.client"} <= sys.modules.keys())
print(gc.get_freeze_count() > 0)
"""

    done = warm_python.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)

    assert done.stdout.split() == ["True", "True"], done.stderr


def test_transformers_is_imported_without_what_no_text_needs() -> None:
    program = """
import sys
import transformers.models
from transformers.utils.import_utils import define_import_structure
from shoal.cli.remote_models.opening import import_transformers

known = transformers.models
# It imports these again, and knows nothing of the files of models any more.
for name in [name for name in sys.modules if name.startswith("transformers.loss")]:
    del sys.modules[name]
del sys.modules["transformers.models"]
define_import_structure.cache_clear()
import_transformers()
again = sys.modules["transformers.models"]
print(again is not known, sorted(dir(again)) == sorted(dir(known)))
print(define_import_structure.cache_info().misses)
print(sys.modules["transformers.utils.import_utils"].define_import_structure.cache_info().misses)
print(hasattr(sys.modules["transformers.loss.loss_for_object_detection"], "linear_sum_assignment"))
print(transformers.utils.is_scipy_available())
"""

    done = warm_python.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)

    assert done.stdout.split() == ["True", "True", "1", "1", "False", "True"], done.stderr


def test_names_of_the_client_are_imported_without_collections_and_collected_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_enabled: list[bool] = []

    def note(name: str, package: str) -> Any:
        is_enabled.append(gc.isenabled())
        return import_module(name, package)

    monkeypatch.delitem(vars(shoal.client), "ClientConfig", raising=False)
    monkeypatch.setattr(shoal.client, "import_module", note)
    assert shoal.client.ClientConfig
    assert (is_enabled, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize(("origin", "expected"), [("nanobind", "collected"), ("builtins", "")])
def test_what_nanobind_would_call_a_leak_is_collected_at_exit(origin: str, expected: str) -> None:
    program = f"""
import os, sys
from types import ModuleType
from shoal.cli.terminal.heavy_imports import importing_much

class Bound:
    def __init__(self):
        self.itself = self
    def __del__(self, write=os.write):
        write(1, b"collected")

Bound.__module__ = {origin!r}
with importing_much():
    sys.modules["triton._C.libtriton"] = ModuleType("libtriton")
    sys.modules["triton._C.libtriton"].bound = Bound()
    del Bound
"""

    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == (expected, "")
