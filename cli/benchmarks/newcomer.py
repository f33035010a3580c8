"""How long a short question waits for its first token while a long prompt is being computed.

The time runs from opening a session to the answer to a prompt of 16 tokens.
"""

import asyncio
import time

from .benchmark_model import BenchmarkModel
from .clients import Clients, SwarmAddress, join_swarm
from .figures import Figure, at_most, compute_median
from .reference import CONTEXT_TOKENS
from .report import Findings
from .setting import Setting
from .timing import time_prompt

_QUIET_CALLS = 5
"""For every call of the effort: they are short."""

_NUM_PROMPTS = 2
"""Beside each there are many first tokens."""


def measure(setting: Setting) -> Findings:
    """Compare first tokens beside a long prompt with those of quiet peers."""
    swarm = setting.start_swarm(setting.model)
    return Findings(setting.run(_measure(setting, SwarmAddress.of(swarm, setting.model))))


async def _measure(setting: Setting, address: SwarmAddress) -> list[Figure]:
    model, effort = setting.model, setting.effort
    async with join_swarm(address) as clients:
        setting.say("quiet")
        await _time_first_token(clients, model, "other")  # warms up
        quiet = compute_median(
            [
                await _time_first_token(clients, model, "other")
                for _ in range(_QUIET_CALLS * effort.num_calls)
            ]
        )
        figures = [Figure("first token, quiet peers", 1000 * quiet, "ms")]
        for whose, client in (("another client's", "other"), ("the same client's", "one")):
            setting.say(f"beside {whose} prompt of {effort.long_prompt}")
            seconds: list[float] = []
            for _ in range(_NUM_PROMPTS):
                seconds += await _time_beside_prompt(clients, setting, client)
            figures += [
                Figure(f"beside {whose} prompt", 1000 * compute_median(seconds), "ms"),
                Figure(f"beside {whose} prompt, slowest", 1000 * max(seconds), "ms"),
                Figure(
                    f"beside {whose} prompt, ratio to quiet", compute_median(seconds) / quiet, "x",
                    at_most(5),
                ),
            ]  # fmt: skip
    return figures


async def _time_beside_prompt(clients: Clients, setting: Setting, client: str) -> list[float]:
    """Return the seconds of first tokens, one after the other, while client "one" has a prompt."""
    num_tokens = setting.effort.long_prompt
    session = clients.open(num_tokens, "one")
    prompt = asyncio.create_task(time_prompt(session, setting.model, num_tokens))
    seconds: list[float] = []
    try:
        await asyncio.sleep(0)  # the prompt goes first
        while not prompt.done():
            seconds.append(await _time_first_token(clients, setting.model, client))
        await prompt
        clients.check_nothing_was_lost()
    finally:
        prompt.cancel()
        await clients.close_sessions()
    return seconds


async def _time_first_token(clients: Clients, model: BenchmarkModel, client: str) -> float:
    started_at = time.perf_counter()
    session = clients.open(2 * CONTEXT_TOKENS, client)
    await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
    seconds = time.perf_counter() - started_at
    await session.close()
    return seconds
