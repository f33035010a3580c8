"""Machines behind lines of a fixed speed, on this one: network namespaces and `tc tbf`.

machine 0 ── line ──┐
machine 1 ── line ──┤ switch
machine 2 ── line ──┘
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager

from shoal.protocol.errors import UsageError

_SHAPE = "root tbf rate {mbits:g}mbit burst 64kb latency 50ms"


class SlowNetwork(AbstractContextManager["SlowNetwork"]):
    """The namespaces of so many machines. Each line has the same speed both ways.

    Raises UsageError where this process may not make any.
    """

    def __init__(self, num_machines: int, mbits: float) -> None:
        self._prefix = f"shoal-{os.getpid()}-"
        self._mbits = mbits
        self._names = list(map(str, range(num_machines)))

    @property
    def places(self) -> Sequence[tuple[str, Sequence[str]]]:
        """The host of each machine, and what runs a command there."""
        return [
            (_find_host(name), ("ip", "netns", "exec", self._prefix + name)) for name in self._names
        ]

    def __enter__(self) -> SlowNetwork:
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise UsageError(f"lines of a fixed speed need {' and '.join(missing)}")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise UsageError(f"no lines of a fixed speed here: {error.stderr.strip()}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        for name in (*self._names, "switch"):
            subprocess.run(["ip", "netns", "del", self._prefix + name], capture_output=True)

    def _make(self) -> None:
        _run(f"ip netns add {self._prefix}switch")
        self._ip("switch", "link add switch type bridge")
        self._ip("switch", "link set switch up")
        for name in self._names:
            _run(f"ip netns add {self._prefix}{name}")
            self._ip(name, "link set lo up")
            self._ip("switch", f"link add to{name} type veth peer eth0 netns {self._prefix}{name}")
            self._ip("switch", f"link set to{name} master switch up")
            self._ip(name, f"addr add {_find_host(name)}/24 dev eth0")
            self._ip(name, "link set eth0 up")
            shape = _SHAPE.format(mbits=self._mbits)
            for place, device in ((name, "eth0"), ("switch", f"to{name}")):
                _run(f"tc -n {self._prefix}{place} qdisc add dev {device} {shape}")

    def _ip(self, name: str, words: str) -> None:
        _run(f"ip -n {self._prefix}{name} {words}")


def _find_host(name: str) -> str:
    return f"10.77.0.{int(name) + 2}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
