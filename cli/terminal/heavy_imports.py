"""Garbage collection around the imports of torch, transformers and hivemind.

They take seconds and make half a million objects. This file imports next to nothing itself.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing_much() -> Iterator[None]:
    """Exclude all objects made inside, modules above all, from garbage collection for good.

    Python would otherwise scan them every few seconds, a quarter of a second in which a peer or a
    client does nothing else, and half a dozen times during the imports. This affects the whole
    process, so it is only for processes of our own, and only if modules were imported.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
            atexit.register(_leave_nothing_to_nanobind)
        if was_enabled:
            gc.enable()


def _leave_nothing_to_nanobind() -> None:
    """Have the objects of triton collected at exit where it is built with nanobind (3.9 is).

    That prints a screenful of lines about leaks for what was excluded. Others exit faster without.
    """
    library = vars(sys.modules.get("triton._C.libtriton", object))
    if any(type(one).__module__ == "nanobind" for one in library.values()):
        gc.unfreeze()
