"""A `shoal` whose user presses Ctrl-C at the moment when it begins to import a certain module.

python interrupted_shoal.py MODULE serve ...
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

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> None:
        if name == self._module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise RuntimeError(f"{name} cannot be imported") from None


if __name__ == "__main__":
    from shoal.cli.__main__ import run

    sys.meta_path.insert(0, Presser(sys.argv.pop(1)))  # type: ignore[arg-type]
    sys.exit(run())
