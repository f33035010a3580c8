"""Memory that sessions take, as the operating system counts that of the peers' processes."""

import asyncio

from measuring.clients import SwarmAddress, join_swarm
from measuring.processes import read_process_bytes
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.setting import Setting

_NUM_SESSIONS = 8
_SETTLING_SECONDS = 0.5
"""Peers hear that a session is over, and free it, without an answer."""


def measure(setting: Setting) -> list[Figure]:
    """Open sessions for a large maximum and use a part of it, then more."""
    swarm = setting.start_swarm(setting.model)
    few_bytes, many_bytes = setting.run(_measure(setting, swarm))
    few, many = setting.effort.lengths
    maximum = setting.effort.maximum
    maximum_bytes = (many_bytes - few_bytes) / (many - few) * maximum
    return [
        Figure(f"{few} of {maximum} tokens used", few_bytes / 2**20, "MiB"),
        Figure(f"{many} of {maximum} tokens used", many_bytes / 2**20, "MiB"),
        Figure(f"{maximum} tokens would take", maximum_bytes / 2**20, "MiB"),
        TargetFigure(f"part of it with {few} tokens", few_bytes / maximum_bytes, "", at_most(0.05)),
        TargetFigure(
            f"part of it with {many} tokens", many_bytes / maximum_bytes, "", at_most(0.2)
        ),
    ]


async def _measure(setting: Setting, swarm: LocalSwarm) -> list[float]:
    """Return the bytes of one session, in all peers together, at each length."""
    model, effort = setting.model, setting.effort
    async with join_swarm(SwarmAddress.of(swarm, model)) as clients:
        setting.say("warming up")
        await clients.open(effort.maximum).step(model.make_hidden(max(effort.lengths)))
        await clients.close_sessions()
        await asyncio.sleep(_SETTLING_SECONDS)
        before = count_peer_bytes(swarm)
        sessions = [clients.open(effort.maximum) for _ in range(_NUM_SESSIONS)]
        used_bytes: list[float] = []
        for length in effort.lengths:
            setting.say(f"{length} tokens")
            for session in sessions:
                await session.step(model.make_hidden(length - session.position))
            used_bytes.append((count_peer_bytes(swarm) - before) / _NUM_SESSIONS)
        clients.check_nothing_was_lost()
    return used_bytes


def count_peer_bytes(swarm: LocalSwarm) -> int:
    """Return the memory that all peers hold, without files that are mapped."""
    return sum(read_process_bytes(peer.pid) for peer in swarm.peers if peer.is_running)
