"""Imports parts of hivemind without its packages' own `__init__`, which import torch and scipy.

`shoal monitor`, `top` and `models` need its DHT and p2pd, no tensors: without torch they start four
seconds earlier and take 220 MB less.
"""

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")

_MODULES = {
    "MSGPackSerializer": "hivemind.utils.serializer",
    "SerializerBase": "hivemind.utils.serializer",
    "get_dht_time": "hivemind.utils.timed_storage",
    "get_logger": "hivemind.utils.logging",
}
"""Where hivemind's DHT finds what it imports from the package hivemind.utils."""


@contextlib.contextmanager
def importing_hivemind() -> Iterator[None]:
    """Import parts of hivemind within, with no word of what it uses itself."""
    for name in _PACKAGES:
        if name not in sys.modules:
            _put_off(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _put_off(name: str) -> None:
    """Have a package run its `__init__` once somebody asks for something that it defines."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def find(attribute: str) -> Any:
        # A module that is being imported is no attribute yet, and Python finds it by itself.
        if attribute.startswith("__") or f"{name}.{attribute}" in sys.modules:
            raise AttributeError(attribute)
        if name == "hivemind.utils" and attribute in _MODULES:
            return getattr(importlib.import_module(_MODULES[attribute]), attribute)
        if "__getattr__" in vars(package):
            del package.__getattr__
            loader.exec_module(package)
        return getattr(package, attribute)

    package.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
