"""Steps of a quiet client beside another one that floods the same peers.

The other one is a process of its own, which runs this module: many sessions that decode as fast as
they can, and long prompts again and again. It says when it has joined, floods from one line on
stdin to the next, then says what it got.

With adapters, its sessions have the largest one that peers take. Its process stays on one core,
which it keeps busy while the other client is quiet, too.
"""

import asyncio
import json
import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import AutoConfig

from measuring.benchmark_model import BenchmarkModel
from measuring.clients import SwarmAddress, join_swarm, time_load
from measuring.helper_process import HelperProcess
from measuring.report import TargetFigure, at_most, compute_percentile
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS
from shoal.client.session.session import RemoteSession
from shoal.client.training.lora import LoraAdapter
from shoal.protocol.errors import RefusedError, RouteError, UnavailableError
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.adapters import MAX_RANK
from swarm_benchmarks.setting import Setting

_PROMPT_TOKENS = 512
_MAX_TOKENS = 2000
_NUM_PROMPTS = 2
"""Sessions of the flood that send a long prompt again and again; all others step."""

_TARGETS = ["gate_proj", "up_proj"]
"""So much of rank 256 fits into the largest adapter of eight blocks of the benchmark model."""

_PAUSE_SECONDS = 0.05
"""Between two attempts of a session that was refused."""


def measure(setting: Setting) -> list[Figure]:
    """Compare the two, and say how much the flood was."""
    return _compare(setting, "plain")


def measure_adapters(setting: Setting) -> list[Figure]:
    """Do the same with adapters."""
    return _compare(setting, "adapters")


def _compare(setting: Setting, kind: str) -> list[Figure]:
    swarm = setting.start_swarm(setting.model)
    address = SwarmAddress.of(swarm, setting.model)
    setting.say("starting the other client")
    with _start_flood(address, setting.effort.num_flooding, kind) as flood:
        flood.read()
        quiet, flooded, flood_seconds = setting.run(_measure(setting, address, flood))
        counts = flood.read()
    quiet_p95, flooded_p95 = compute_percentile(quiet, 95), compute_percentile(flooded, 95)
    prompt_speed = counts["prompt_tokens"] / flood_seconds
    return [
        Figure("quiet, median step", 1000 * statistics.median(quiet), "ms"),
        Figure("quiet, 95th percentile", 1000 * quiet_p95, "ms"),
        Figure("flooded, median step", 1000 * statistics.median(flooded), "ms"),
        Figure("flooded, 95th percentile", 1000 * flooded_p95, "ms"),
        TargetFigure("ratio of the 95th percentiles", flooded_p95 / quiet_p95, "x", at_most(2)),
        Figure("the flood, steps", counts["steps"] / flood_seconds, "steps/s"),
        Figure("the flood, prompts", prompt_speed, "tok/s"),
        Figure("the flood, refused", counts["refusals"], "times"),
    ]


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


def _start_flood(address: SwarmAddress, num_sessions: int, kind: str) -> HelperProcess:
    """Start the other client; it joins the swarm and waits."""
    directory, peers = str(address.model.directory), " ".join(address.initial_peers)
    return HelperProcess(__name__, directory, address.model_id, peers, str(num_sessions), kind)


class Described:
    """A model as far as an adapter has to know it."""

    def __init__(self, model: BenchmarkModel) -> None:
        self.config = AutoConfig.from_pretrained(model.directory)


async def _flood(address: SwarmAddress, num_sessions: int, kind: str) -> None:
    counts: Counter[str] = Counter(steps=0, prompt_tokens=0, refusals=0)
    model, is_begun = address.model, threading.Event()
    async with join_swarm(address) as clients:
        open_session = partial(clients.open, _MAX_TOKENS, "flood")
        if kind == "adapters":
            rank = min(MAX_RANK, model.hidden_size)
            adapter = LoraAdapter.create(Described(model), rank=rank, target_modules=_TARGETS)
            open_session = partial(clients.open_adapted, _MAX_TOKENS, adapter.take_version())
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            session = open_session()
            await session.step(model.make_hidden(1))  # brings the adapter
            threading.Thread(target=_keep_busy, args=[is_begun], daemon=True).start()
        print(json.dumps("joined"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        is_begun.set()
        lengths = [CONTEXT_TOKENS] * num_sessions + [_PROMPT_TOKENS] * _NUM_PROMPTS
        tasks = [
            asyncio.create_task(_live(open_session, model, counts, length)) for length in lengths
        ]
        await asyncio.to_thread(sys.stdin.readline)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    print(json.dumps(counts), flush=True)


def _keep_busy(is_over: threading.Event) -> None:
    while not is_over.is_set():
        pass


async def _live(
    open_session: Callable[[], RemoteSession],
    model: BenchmarkModel,
    counts: Counter[str],
    num_prompt_tokens: int,
) -> None:
    """Send a prompt and decode behind a short one, again and again, until cancelled."""
    while True:
        session = open_session()
        try:
            while True:
                session.rollback(0)
                await session.step(model.make_hidden(num_prompt_tokens), last_token_only=True)
                counts["prompt_tokens"] += num_prompt_tokens
                while num_prompt_tokens == CONTEXT_TOKENS and session.position < _MAX_TOKENS:
                    await session.step(model.make_hidden(1), is_decoded=True)
                    counts["steps"] += 1
        except (RefusedError, RouteError, UnavailableError):
            counts["refusals"] += 1
            await session.close()
            await asyncio.sleep(_PAUSE_SECONDS)


def _main(directory: str, model_id: str, initial_peers: str, num_sessions: str, kind: str) -> None:
    model = BenchmarkModel.open(Path(directory))
    address = SwarmAddress(model, ModelId(model_id), tuple(initial_peers.split()))
    asyncio.run(_flood(address, int(num_sessions), kind))


if __name__ == "__main__":
    _main(*sys.argv[1:])
