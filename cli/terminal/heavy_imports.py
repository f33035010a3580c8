"""Importing torch, transformers and hivemind: seconds, and half a million objects.

Imports next to nothing itself.
"""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing_much() -> Iterator[None]:
    """Keep what is made inside, modules above all, from ever being looked through for garbage.

    It stays until the process ends. Python would look through all of it every few seconds of work,
    a quarter of a second in which a peer answers nobody and a client takes no step; and half a
    dozen times while it is imported. For processes that are ours: this concerns everything in them,
    and so it happens only where modules have come.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
