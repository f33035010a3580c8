"""Workers of pytest-xdist that have nothing left to import: all are forked from one process.

It imports what tests need, while the controller of pytest goes on. xdist starts each worker by this
program in place of Python; it asks that process for one, with its own streams, and waits for its
end.

    python warm_workers.py FORK DESCRIPTOR            # forks for who connects to a listening socket
    python warm_workers.py ASK NAME -u -c PROGRAM     # becomes a worker
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

_NUM_REWRITERS = 2
"""One for each core of a small machine."""

_KIND = (socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", 0))


def warm(specs: Sequence[Any]) -> Callable[[], None]:
    """Let xdist have its workers forked; return what ends the process that does so."""
    import warm_python

    name = f"shoal-workers-{os.getpid()}"
    with socket.socket(*_KIND) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, "FORK", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C is for the workers
            env={**os.environ, **warm_python.SETTINGS},
        )
    for spec in specs:
        spec.python = shlex.join([sys.executable, __file__, "ASK", name])

    def end() -> None:
        process.communicate()  # its stdin is closed

    return end


def _ask(name: str, command: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends by it, and we with that
    request = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "process_group": os.getpgrp(),
        "starts_peers": True,
    }
    with socket.socket(*_KIND) as control:
        control.connect(f"\0{name}")
        socket.send_fds(control, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(control.recv(64))
    for stream in range(3):
        os.close(stream)
    select.select([os.pidfd_open(pid)], [], [])


def _fork_workers(listener: socket.socket) -> None:
    """Fork for who asks, until the other end of stdin is closed."""
    import warm_python

    rewriters = [_fork(_rewrite_assertions, number) for number in range(_NUM_REWRITERS)]
    warm_python.import_everything()
    for pid in rewriters:
        os.waitpid(pid, 0)
    while sys.stdin.fileno() not in select.select([listener, 0], [], [])[0]:
        control, _ = listener.accept()
        with control:
            request = warm_python.fork_once(control)
        if request is not None:
            listener.close()
            warm_python.be(request)


def _fork(do: Callable[[int], object], number: int) -> int:
    """Fork a process that does something and ends; return its process id."""
    if pid := os.fork():
        return pid
    try:
        do(number)
    finally:
        os._exit(0)


def _rewrite_assertions(number: int) -> None:
    """Store a share of the tests as pytest rewrites them, unless that is stored already.

    It is two thirds of the time that collecting takes. Workers that begin together would all do it.
    """
    files = sorted(Path(__file__).parents[1].rglob("test_*.py"))
    for file in files[number::_NUM_REWRITERS]:
        stored = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, stored) is None:
            status, code = rewrite._rewrite_test(file, None)  # pyright: ignore[reportArgumentType]
            stored.parent.mkdir(exist_ok=True)
            state = SimpleNamespace(trace=print)
            rewrite._write_pyc(state, code, status, stored)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["FORK", descriptor]:
            _fork_workers(socket.socket(fileno=int(descriptor)))
        case ["ASK", name, *command]:
            _ask(name, command)
