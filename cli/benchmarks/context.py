"""Decoding behind a long text and a short one, in turn, so that both meet the same machine."""

from .clients import SwarmAddress, join_swarm
from .figures import Figure, at_least, compute_median
from .report import Findings
from .setting import Setting
from .timing import time_steps

_TURN_STEPS = 10


def measure(setting: Setting) -> Findings:
    """Compare the speed of steps behind the two."""
    swarm = setting.start_swarm(setting.model)
    short, long = setting.effort.contexts
    short_seconds, long_seconds = setting.run(
        _measure(setting, SwarmAddress.of(swarm, setting.model))
    )
    return Findings(
        [
            Figure(f"behind {short} tokens", 1 / short_seconds, "steps/s"),
            Figure(f"behind {long} tokens", 1 / long_seconds, "steps/s"),
            Figure("ratio of the two speeds", short_seconds / long_seconds, "x", at_least(0.6)),
        ]
    )


async def _measure(setting: Setting, address: SwarmAddress) -> list[float]:
    """Return the median seconds of a step behind each text."""
    model, effort = setting.model, setting.effort
    async with join_swarm(address) as clients:
        sessions = [clients.open(length + effort.num_steps) for length in effort.contexts]
        for session, length in zip(sessions, effort.contexts, strict=True):
            setting.say(f"a prompt of {length}")
            await session.step(model.make_hidden(length), last_token_only=True)
        setting.say("steps")
        seconds: list[list[float]] = [[] for _ in sessions]
        for _ in range(effort.num_steps // _TURN_STEPS):
            for session, noted in zip(sessions, seconds, strict=True):
                noted += await time_steps(session, model, _TURN_STEPS)
        clients.check_nothing_was_lost()
    return [compute_median(noted) for noted in seconds]
