"""Steps of a quiet client beside another one that floods the same peers.

The other one is a process of its own: many sessions that decode as fast as they can, and long
prompts again and again.
"""

import asyncio

from .clients import SwarmAddress, join_swarm
from .figures import Figure, at_most, compute_median, compute_percentile
from .flooding_client import start_flooding_client
from .helper_process import HelperProcess
from .reference import CONTEXT_TOKENS
from .report import Findings
from .setting import Setting
from .timing import time_load

_PROMPT_TOKENS = 512
_MAX_TOKENS = 2000


def measure(setting: Setting) -> Findings:
    """Compare the two, and say how much the flood was."""
    swarm = setting.start_swarm(setting.model)
    address = SwarmAddress.of(swarm, setting.model)
    setting.say("starting the other client")
    with start_flooding_client(address, setting.effort.num_flooding, _PROMPT_TOKENS) as flood:
        flood.read()
        quiet, flooded, flood_seconds = setting.run(_measure(setting, address, flood))
        counts = flood.read()
    quiet_p95, flooded_p95 = compute_percentile(quiet, 95), compute_percentile(flooded, 95)
    prompt_speed = counts["prompt_tokens"] / flood_seconds
    return Findings(
        [
            Figure("quiet, median step", 1000 * compute_median(quiet), "ms"),
            Figure("quiet, 95th percentile", 1000 * quiet_p95, "ms"),
            Figure("flooded, median step", 1000 * compute_median(flooded), "ms"),
            Figure("flooded, 95th percentile", 1000 * flooded_p95, "ms"),
            Figure("ratio of the 95th percentiles", flooded_p95 / quiet_p95, "x", at_most(2)),
            Figure("the flood, steps", counts["steps"] / flood_seconds, "steps/s"),
            Figure("the flood, prompts", prompt_speed, "tok/s"),
            Figure("the flood, refused", counts["refusals"], "times"),
        ]
    )


async def _measure(
    setting: Setting, address: SwarmAddress, flood: HelperProcess
) -> tuple[list[float], list[float], float]:
    """Return the seconds of steps, quiet and flooded, and how long the flood went on."""
    model, seconds = setting.model, setting.effort.load_seconds
    loop = asyncio.get_running_loop()
    async with join_swarm(address) as clients:
        session = clients.open(_MAX_TOKENS)
        await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
        await time_load([session], model, seconds / 5)  # warms up
        setting.say("quiet")
        quiet, _ = await time_load([session], model, seconds)
        flood.tell("begin")
        began_at = loop.time()
        setting.say("the flood rises")
        await asyncio.sleep(seconds / 5)
        setting.say("flooded")
        flooded, _ = await time_load([session], model, seconds)
        flood.tell("end")
        flood_seconds = loop.time() - began_at
        clients.check_nothing_was_lost()
    return quiet, flooded, flood_seconds
