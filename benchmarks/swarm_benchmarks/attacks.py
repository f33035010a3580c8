"""Tokens of a client, and the lag of the peer's event loop, while strangers attack the peer.

The peer and its client have one core, an attacker (`attacker.py` or `dht_attacker.py`) the other.
Quiet steps are measured before each attack, while the attacker keeps its core busy with nothing.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from measuring.clients import SwarmAddress, join_swarm
from measuring.helper_process import HelperProcess
from measuring.processes import read_process_bytes
from measuring.report import TargetFigure, at_most, compute_percentile
from shoal.cli.benchmarking.figure import Figure
from shoal.client.session.session import RemoteSession
from shoal.protocol.errors import ShoalError
from shoal.protocol.ids import ModelId
from swarm_benchmarks.attacker import ATTACKS
from swarm_benchmarks.dht_attacker import DHT_QUESTIONS
from swarm_benchmarks.setting import Setting

_MAX_TOKENS = 500
_MOST_LAG_MS = 50.0
_QUIET = "quiet"


class _Seen(NamedTuple):
    """What was measured during one attack, or none."""

    steps: list[float]
    lags: list[float]
    memory_bytes: int


def measure(setting: Setting) -> list[Figure]:
    """Attack a peer of the bundled model in every way in turn."""
    model = setting.tiny_model
    setting.say("starting the peer")
    module, arguments = "measuring.watched_peer", (str(model.directory), str(model.num_blocks), "0")
    with _on_core(0), HelperProcess(module, *arguments) as peer:
        facts = peer.read()
        address = SwarmAddress(model, ModelId(facts["model_id"]), tuple(facts["addresses"]))
        host, _, port = facts["endpoint"].rpartition(":")
        foes = [
            (ATTACKS, ("swarm_benchmarks.attacker", host, port)),
            ([DHT_QUESTIONS], ("swarm_benchmarks.dht_attacker", address.initial_peers[0])),
        ]
        figures: list[Figure] = []
        for names, command in foes:
            with HelperProcess(*command, str(_find_other_core())) as foe:
                foe.read()
                figures += setting.run(_measure(setting, address, peer, foe, facts["pid"], names))
        return figures


def _find_other_core() -> int:
    return max(1, (os.cpu_count() or 1) - 1)


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Stay on one core, with all processes that are started."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


async def _measure(
    setting: Setting,
    address: SwarmAddress,
    peer: HelperProcess,
    foe: HelperProcess,
    pid: int,
    names: Iterable[str],
) -> list[Figure]:
    figures: list[Figure] = []
    async with join_swarm(address) as clients:
        for name in names:
            session = clients.open(_MAX_TOKENS)
            see = partial(_see, setting, session, peer, foe, pid)
            setting.say(name)
            quiet = await see(_QUIET)  # right before: the speed of machines changes by the minute
            seen = await see(name)
            foe.tell(_QUIET)
            num_times = await asyncio.to_thread(foe.read)
            quiet_p95, p95 = (compute_percentile(one.steps, 95) for one in (quiet, seen))
            lag = compute_percentile(seen.lags, 99)
            growth = seen.memory_bytes - quiet.memory_bytes
            figures += [
                Figure(f"{name}: 95th percentile, quiet", 1000 * quiet_p95, "ms"),
                Figure(f"{name}: 95th percentile", 1000 * p95, "ms"),
                TargetFigure(f"{name}: that to quiet", p95 / quiet_p95, "x", at_most(2)),
                TargetFigure(f"{name}: lag, p99", 1000 * lag, "ms", at_most(_MOST_LAG_MS)),
                Figure(f"{name}: memory meanwhile", growth / 2**20, "MiB"),
                Figure(f"{name}: repeated", num_times, "times"),
            ]
    return figures


async def _see(
    setting: Setting,
    session: RemoteSession,
    peer: HelperProcess,
    foe: HelperProcess,
    pid: int,
    attack: str,
) -> _Seen:
    """Have the stranger attack, and measure once the attack is under way."""
    load_seconds = setting.effort.load_seconds
    foe.tell(attack)
    await asyncio.to_thread(foe.read)
    try:
        await _time_steps(session, setting, load_seconds / 5)
        peer.tell("forget")
        await asyncio.to_thread(peer.read)
        steps = await _time_steps(session, setting, load_seconds)
    except ShoalError as error:
        setting.say(f"{attack}: {error}")
        steps = [math.inf]
    peer.tell("lags")
    lags = await asyncio.to_thread(peer.read)
    return _Seen(steps, lags, read_process_bytes(pid))


async def _time_steps(session: RemoteSession, setting: Setting, load_seconds: float) -> list[float]:
    """Return the seconds of steps of one token, one behind the other."""
    model, seconds = setting.tiny_model, list[float]()
    until = time.perf_counter() + load_seconds
    while time.perf_counter() < until:
        if session.position + 1 >= _MAX_TOKENS:
            session.rollback(0)
        started_at = time.perf_counter()
        await session.step(model.make_hidden(1), is_decoded=True)
        seconds.append(time.perf_counter() - started_at)
    return seconds
