"""How long a swarm takes to be ready and a client to join it, and what imports cost.

Imports and the first token of `shoal generate` are told beside `import torch`, each the median of
ratios of which both halves were measured one after the other. Processor time is what others on the
machine disturb least.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from measuring.clients import SwarmAddress, join_swarm
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.errors import UnavailableError
from swarm_benchmarks.setting import Setting

_TORCH = "import torch"

_TARGETS = {
    "import shoal.client": 2.0,
    "shoal generate to its first token": 2.5,
}
"""How many times as long as torch each may take."""

_PROGRAMS = {
    _TORCH: "import torch",
    "import shoal.client": "import shoal.client",
    "import the model class": "from shoal.client import AutoDistributedModelForCausalLM",
}
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_READY = "; print('ready', flush=True)"
_GENERATE = """
import sys
from shoal.cli.main import main
sys.exit(main("generate shoal-stories Once --max-new-tokens 4 --initial-peers {address}".split()))
"""


class Cost(NamedTuple):
    """CPU and wall-clock time of a program so far."""

    seconds: float
    cpu_seconds: float


_SPANS = [(0, 3), (3, 6), (3, 6), (6, 8)]


def measure(setting: Setting) -> list[Figure]:
    """Time imports, a swarm of four on the bundled model, and clients that join."""
    setting.say("four peers")
    started_at = time.perf_counter()
    with LocalSwarm(setting.tiny_model.directory, spans=_SPANS) as swarm:
        ready = time.perf_counter() - started_at
        setting.say("joining")
        address = SwarmAddress.of(swarm, setting.tiny_model)
        joining = [setting.run(_time_joining(address)) for _ in range(setting.effort.num_calls)]
        setting.say("imports")
        generate = _GENERATE.format(address=swarm.initial_peers[0])
        programs = {name: program + _READY for name, program in _PROGRAMS.items()}
        programs |= {"shoal generate to its first token": generate}
        rounds = [
            {name: _time_program(program) for name, program in programs.items()}
            for _ in range(2 * setting.effort.num_calls if setting.effort.num_calls > 1 else 1)
        ]
    return [
        *_compare_with_torch(rounds[1:] or rounds),  # the first round reads the disk
        TargetFigure("4 peers of the bundled model ready", ready, "s", at_most(15)),
        Figure("a client joins", statistics.median(joining), "s"),
    ]


def _compare_with_torch(rounds: list[dict[str, Cost]]) -> list[Figure]:
    torch = [one[_TORCH] for one in rounds]
    figures = [
        Figure(f"{_TORCH}, processor", statistics.median(cost.cpu_seconds for cost in torch), "s"),
        Figure(_TORCH, statistics.median(cost.seconds for cost in torch), "s"),
    ]
    for name in list(rounds[0])[1:]:
        ratios = [one[name].cpu_seconds / one[_TORCH].cpu_seconds for one in rounds]
        walls = [one[name].seconds / one[_TORCH].seconds for one in rounds]
        label = f"{name}, beside torch"
        named = (f"{label}, processor", statistics.median(ratios), "x")
        target = _TARGETS.get(name)
        figures += [
            Figure(*named) if target is None else TargetFigure(*named, at_most(target)),
            Figure(label, statistics.median(walls), "x"),
        ]
    return figures


def _time_program(program: str) -> Cost:
    """Return what a fresh interpreter needs until a program writes its first byte."""
    started_at = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # As for users: what the first round has compiled is kept.
        env={name: value for name, value in os.environ.items() if name != _NO_BYTECODE},
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cost = Cost(
            time.perf_counter() - started_at,
            sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK"),
        )
        process.stdout.read()
    if process.returncode:
        raise UnavailableError(f"what was to be timed failed: {program}")
    return cost


async def _time_joining(address: SwarmAddress) -> float:
    started_at = time.perf_counter()
    async with join_swarm(address):
        return time.perf_counter() - started_at
