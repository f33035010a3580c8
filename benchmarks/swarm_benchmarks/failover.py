"""From the loss of a peer in use to the answer of the next step, with replicas at hand, which have
nothing of the session or, as hot standbys, all.
"""

import asyncio
import time
from collections.abc import Callable

from measuring.clients import Clients, SwarmAddress, join_swarm, time_steps
from measuring.report import TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from swarm_benchmarks.setting import Setting

_PROMPT_TOKENS = 270
_NUM_STEPS = 30
_CONTEXT_TOKENS = _PROMPT_TOKENS + _NUM_STEPS

_STANDBY_SECONDS = 60.0
"""How long standbys may take to be ready."""


def measure(setting: Setting) -> list[Figure]:
    """Kill one peer, pause another, and end the swarm, which is of no use afterwards."""
    swarm = setting.start_swarm(setting.model)
    try:
        setting.say("starting replicas")
        swarm.wait_until_online([swarm.add(setting.model.halves[1], wait=False) for _ in range(3)])
        standby_seconds = setting.run(_measure_standby(setting, swarm))
        kill_seconds, pause_seconds = setting.run(_measure(setting, swarm))
    finally:
        setting.end_swarm(setting.model)
    behind = f"{_CONTEXT_TOKENS} tokens of context"
    return [
        TargetFigure(f"SIGKILL to the next step, {behind}", kill_seconds, "s", at_most(1)),
        Figure("the same with hot standbys", standby_seconds, "s"),
        TargetFigure(f"SIGSTOP to the next step, {behind}", pause_seconds, "s", at_most(5)),
    ]


async def _measure(setting: Setting, swarm: LocalSwarm) -> list[float]:
    async with join_swarm(SwarmAddress.of(swarm, setting.model)) as clients:
        seconds: list[float] = []
        for name, lose in (("SIGKILL", LocalPeer.kill), ("SIGSTOP", LocalPeer.pause)):
            setting.say(name)
            seconds.append(await _time_loss(setting, clients, swarm, lose))
        return seconds


async def _measure_standby(setting: Setting, swarm: LocalSwarm) -> float:
    setting.say("SIGKILL with standbys")
    async with join_swarm(SwarmAddress.of(swarm, setting.model), standby=True) as clients:
        seconds = await _time_loss(setting, clients, swarm, LocalPeer.kill, num_standbys=1)
    return seconds


async def _time_loss(
    setting: Setting,
    clients: Clients,
    swarm: LocalSwarm,
    lose: Callable[[LocalPeer], None],
    num_standbys: int = 0,
) -> float:
    """Return the seconds from losing the second hop to the next answer."""
    model = setting.model
    session = clients.open(_CONTEXT_TOKENS + 1)
    await session.step(model.make_hidden(_PROMPT_TOKENS), last_token_only=True)
    async with asyncio.timeout(_STANDBY_SECONDS):
        while len(session.standbys) < num_standbys:  # noqa: ASYNC110 - it happens behind the steps
            await asyncio.sleep(0.1)
    await time_steps(session, model, _NUM_STEPS)
    victim = swarm.find(session.hops[1].peer.peer_id)
    started_at = time.perf_counter()
    lose(victim)
    await time_steps(session, model, 1)
    seconds = time.perf_counter() - started_at
    assert session.failovers, "the peer was lost and nothing happened"
    return seconds
