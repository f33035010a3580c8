"""What `--metrics` costs a session, steps with it and without it in turn, and what a scrape costs.

The peers with metrics are asked for them in each of their turns, every two seconds or so. Processes
of one program differ, by where their memory lies, so several rounds have new ones.
"""

import asyncio
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack

from measuring.clients import SwarmAddress, join_swarm, time_steps
from measuring.processes import read_thread_seconds
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS
from shoal.client.session.session import RemoteSession
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.setting import Setting

_ROUNDS_PER_CALL = 2
_TURNS = 8
"""Pairs of turns in a round."""

_METRICS = "--metrics", "0"
_SCRAPE_ROUNDS = 5
_SCRAPES = 100
_IDLE_SECONDS = 3.0


def measure(setting: Setting) -> list[Figure]:
    """Compare the steps of a session through peers with metrics and through others."""
    rounds = list[list[tuple[float, float]]]()
    num_rounds = _ROUNDS_PER_CALL * setting.effort.num_calls
    for number in range(num_rounds):
        setting.say(f"round {number + 1} of {num_rounds}")
        rounds.append(_measure_round(setting))
    without, with_metrics = (
        statistics.median(pair[which] for pairs in rounds for pair in pairs) for which in (0, 1)
    )
    ratios = [statistics.median(off / on for off, on in pairs) for pairs in rounds]
    overall = statistics.median(off / on for pairs in rounds for off, on in pairs)
    return [
        Figure("steps without metrics", 1 / without, "steps/s"),
        Figure("steps with metrics", 1 / with_metrics, "steps/s"),
        TargetFigure("ratio of the two, median of pairs", overall, "x", at_least(0.99)),
        Figure("ratio in the slowest round", min(ratios), "x"),
        Figure("ratio in the fastest round", max(ratios), "x"),
    ]


def measure_scrape(setting: Setting) -> list[Figure]:
    """Measure the processor time that a scrape takes of a peer's event loop, its main thread."""
    with LocalSwarm(
        setting.model.directory, [(0, 1)], weights="int8", serve_arguments=_METRICS
    ) as swarm:
        (peer,) = swarm.peers
        scrapes = [peer.facts["url"]] * _SCRAPES
        _ask_for_metrics(scrapes)  # warms up
        idle, _ = _time_threads(peer.pid, lambda: time.sleep(_IDLE_SECONDS))
        rounds = list[tuple[float, float]]()
        for number in range(_SCRAPE_ROUNDS):
            setting.say(f"round {number + 1} of {_SCRAPE_ROUNDS}")
            rounds.append(_time_threads(peer.pid, lambda: _ask_for_metrics(scrapes)))
    loop, process = (statistics.median(costs) / _SCRAPES for costs in zip(*rounds, strict=True))
    return [
        TargetFigure("a scrape, of the loop's time, median", 1e3 * loop, "ms", at_most(1)),
        Figure("with the thread that writes the text", 1e3 * process, "ms"),
        Figure("the loop of an idle peer", 100 * idle / _IDLE_SECONDS, "% of a core"),
    ]


def _time_threads(pid: int, act: Callable[[], None]) -> tuple[float, float]:
    """Return what a process computes meanwhile, in seconds: its main thread, and all threads."""
    before = read_thread_seconds(pid)
    act()
    after = read_thread_seconds(pid)
    return after[0] - before[0], after[1] - before[1]


def _measure_round(setting: Setting) -> list[tuple[float, float]]:
    """Return pairs of the mean seconds of a step, without and with metrics."""
    model = setting.model
    with ExitStack() as stack:
        swarms = [
            stack.enter_context(
                LocalSwarm(model.directory, model.halves, weights="int8", serve_arguments=options)
            )
            for options in ((), _METRICS)
        ]
        return setting.run(_measure_turns(setting, swarms))


async def _measure_turns(
    setting: Setting, swarms: Sequence[LocalSwarm]
) -> list[tuple[float, float]]:
    model, num_steps = setting.model, setting.effort.num_steps
    urls = [[p.facts["url"] for p in swarm.peers if "url" in p.facts] for swarm in swarms]
    pairs = list[tuple[float, float]]()
    async with AsyncExitStack() as stack:
        sessions = list[RemoteSession]()
        for swarm in swarms:
            clients = await stack.enter_async_context(join_swarm(SwarmAddress.of(swarm, model)))
            stack.callback(clients.check_nothing_was_lost)
            sessions.append(clients.open(CONTEXT_TOKENS + (_TURNS + 1) * num_steps))
            await sessions[-1].step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
            await time_steps(sessions[-1], model, num_steps)  # warms up
        for turn in range(_TURNS):
            seconds = [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                asking = asyncio.create_task(asyncio.to_thread(_ask_for_metrics, urls[which]))
                seconds[which] = statistics.mean(
                    await time_steps(sessions[which], model, num_steps)
                )
                await asking
            pairs.append((seconds[0], seconds[1]))
    return pairs


def _ask_for_metrics(urls: Sequence[str]) -> None:
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()
