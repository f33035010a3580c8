"""A `shoal` that gets a signal at the moment when it begins to import a certain module.

python interrupted_shoal.py SIGINT MODULE serve ...
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType


class Presser:
    """Sees every import before anybody else does; finds no module.

    Does as libraries do that catch whatever goes wrong in an import, a KeyboardInterrupt too.
    """

    def __init__(self, number: signal.Signals, module: str) -> None:
        self._number = number
        self._module = module

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> None:
        if name == self._module:
            try:
                os.kill(os.getpid(), self._number)
            except KeyboardInterrupt:
                raise RuntimeError(f"{name} cannot be imported") from None


if __name__ == "__main__":
    from shoal.cli.__main__ import run

    number = signal.Signals[sys.argv.pop(1)]
    sys.meta_path.insert(0, Presser(number, sys.argv.pop(1)))  # type: ignore[arg-type]
    sys.exit(run())
