"""A second process of a measurement: told what to do in lines, answers in lines of JSON."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.protocol.errors import UnavailableError

_ANSWER_SECONDS = 120.0
"""Generous: most of it are imports on a busy machine."""

_GOODBYE_SECONDS = 10.0
_IMPORT_PATH = str(Path(__file__).resolve().parents[1])
"""Where the modules of benchmarks are found."""


class HelperProcess:
    """Runs a module of the benchmarks, for use in a `with` block. It ends with its stdin, and what
    it has started ends with it. `inside` runs the command elsewhere.
    """

    def __init__(self, module: str, *arguments: str, inside: Sequence[str] = ()) -> None:
        self._name = module
        # A process group of its own: Ctrl-C goes to the parent only, who then ends this one.
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-P", "-m", module, *arguments],
            env={**os.environ, "PYTHONPATH": _IMPORT_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def __enter__(self) -> "HelperProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._process.communicate(timeout=_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()

    def end(self) -> Any:
        """Close its stdin, and return the line of JSON that it says then."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None  # communicate() would flush it
        return self.read()

    def tell(self, word: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def read(self) -> Any:
        """Return the next line of JSON. Raises UnavailableError when there is none."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(_ANSWER_SECONDS, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise UnavailableError(f"the process {self._name} ended before it was done")
        return json.loads(line)
