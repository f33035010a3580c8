"""Prompts of several lengths through two peers, and short ones while a long one is computed.

Only the last token's hidden state returns.
"""

import asyncio
import statistics
import time

from measuring.benchmark_model import BenchmarkModel
from measuring.clients import Clients, SwarmAddress, join_swarm, time_prompt
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS
from swarm_benchmarks.setting import Setting

_COMPARED_TOKENS = 512
_QUIET_CALLS = 5
"""For every call of the effort: they are short."""

_NUM_LONG_PROMPTS = 2
"""Beside each there are many first tokens."""


def measure_prompts(setting: Setting) -> list[Figure]:
    """Measure every length of a prompt, one of them against plain transformers."""
    swarm = setting.start_swarm(setting.model)
    setting.say("plain transformers")
    reference = setting.reference.measure_prompt(_COMPARED_TOKENS)
    speeds = setting.run(_measure_speeds(setting, SwarmAddress.of(swarm, setting.model)))
    figures = [Figure(f"plain transformers, prompt of {_COMPARED_TOKENS}", reference, "tok/s")]
    for num_tokens, speed in speeds.items():
        figures.append(Figure(f"prompt of {num_tokens}", speed, "tok/s"))
    ratio = speeds[_COMPARED_TOKENS] / reference
    name = f"ratio to plain transformers at {_COMPARED_TOKENS}"
    return [*figures, TargetFigure(name, ratio, "x", at_least(1.1))]


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
            speeds[num_tokens] = num_tokens / statistics.median(seconds[1:])  # the first warms up
    return speeds


def measure_newcomer(setting: Setting) -> list[Figure]:
    """Compare first tokens beside a long prompt with those of quiet peers.

    The time runs from opening a session to the answer to a prompt of 16 tokens.
    """
    swarm = setting.start_swarm(setting.model)
    return setting.run(_measure_newcomer(setting, SwarmAddress.of(swarm, setting.model)))


async def _measure_newcomer(setting: Setting, address: SwarmAddress) -> list[Figure]:
    model, effort = setting.model, setting.effort
    async with join_swarm(address) as clients:
        setting.say("quiet")
        await _time_first_token(clients, model, "other")  # warms up
        quiet = statistics.median(
            [
                await _time_first_token(clients, model, "other")
                for _ in range(_QUIET_CALLS * effort.num_calls)
            ]
        )
        figures = [Figure("first token, quiet peers", 1000 * quiet, "ms")]
        for whose, client in (("another client's", "other"), ("the same client's", "one")):
            setting.say(f"beside {whose} prompt of {effort.long_prompt}")
            seconds: list[float] = []
            for _ in range(_NUM_LONG_PROMPTS):
                seconds += await _time_beside_prompt(clients, setting, client)
            figures += [
                Figure(f"beside {whose} prompt", 1000 * statistics.median(seconds), "ms"),
                Figure(f"beside {whose} prompt, slowest", 1000 * max(seconds), "ms"),
                TargetFigure(
                    f"beside {whose} prompt, ratio to quiet",
                    statistics.median(seconds) / quiet, "x", at_most(5),
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
