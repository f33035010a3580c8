"""Prompts of several lengths through two peers; only the last token's hidden state returns."""

from .clients import SwarmAddress, join_swarm
from .figures import Figure, at_least, compute_median
from .report import Findings
from .setting import Setting
from .timing import time_prompt

_COMPARED_TOKENS = 512


def measure(setting: Setting) -> Findings:
    """Measure every length, one of them against plain transformers."""
    swarm = setting.start_swarm(setting.model)
    setting.say("plain transformers")
    reference = setting.reference.measure_prompt(_COMPARED_TOKENS)
    speeds = setting.run(_measure_speeds(setting, SwarmAddress.of(swarm, setting.model)))
    figures = [Figure(f"plain transformers, prompt of {_COMPARED_TOKENS}", reference, "tok/s")]
    for num_tokens, speed in speeds.items():
        figures.append(Figure(f"prompt of {num_tokens}", speed, "tok/s"))
    ratio = speeds[_COMPARED_TOKENS] / reference
    name = f"ratio to plain transformers at {_COMPARED_TOKENS}"
    return Findings([*figures, Figure(name, ratio, "x", at_least(1.1))])


async def _measure_speeds(setting: Setting, address: SwarmAddress) -> dict[int, float]:
    """Return tokens per second by the length of the prompt."""
    speeds: dict[int, float] = {}
    async with join_swarm(address) as clients:
        for num_tokens in setting.effort.prompts:
            setting.say(f"{num_tokens} tokens")
            session = clients.open(num_tokens)
            seconds: list[float] = []
            for _ in range(2 + setting.effort.num_calls):
                session.rollback(0)
                seconds.append(await time_prompt(session, setting.model, num_tokens))
            clients.check_nothing_was_lost()
            await clients.close_sessions()
            speeds[num_tokens] = num_tokens / compute_median(seconds[1:])  # the first warms up
    return speeds
