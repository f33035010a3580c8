"""How long a swarm takes to be ready and a client to join it, and what imports cost."""

import statistics
import subprocess
import sys
import time

from measuring.clients import SwarmAddress, join_swarm
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.setting import Setting

_SPANS = [(0, 3), (3, 6), (3, 6), (6, 8)]


def measure(setting: Setting) -> list[Figure]:
    """Time imports, a swarm of four on the bundled model, and clients that join."""
    setting.say("imports")
    import_seconds = [_time_import(module) for module in ("torch", "shoal.client")]
    setting.say("four peers")
    started_at = time.perf_counter()
    with LocalSwarm(setting.tiny_model.directory, spans=_SPANS) as swarm:
        ready = time.perf_counter() - started_at
        setting.say("joining")
        address = SwarmAddress.of(swarm, setting.tiny_model)
        joining = [setting.run(_time_joining(address)) for _ in range(setting.effort.num_calls)]
    return [
        Figure("import torch", import_seconds[0], "s"),
        Figure("import shoal.client", import_seconds[1], "s"),
        TargetFigure("4 peers of the bundled model ready", ready, "s", at_most(15)),
        Figure("a client joins", statistics.median(joining), "s"),
    ]


def _time_import(module: str) -> float:
    """Return the seconds a fresh interpreter needs for one import, with the disk cache warm."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    subprocess.run(command, check=True)
    started_at = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started_at


async def _time_joining(address: SwarmAddress) -> float:
    started_at = time.perf_counter()
    async with join_swarm(address):
        return time.perf_counter() - started_at
