"""Gradients through two peers, against plain transformers with the same blocks frozen; what travels
for them; and the steps of a client beside another one that trains.

The one that trains is a process of its own, which runs this module: it says when it has joined,
trains as fast as it can from one line on stdin to the next, then says how fast.
"""

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from measuring.benchmark_model import BenchmarkModel
from measuring.clients import SwarmAddress, join_swarm, time_load
from measuring.helper_process import HelperProcess
from measuring.report import TargetFigure, at_least, at_most, compute_percentile
from measuring.watched_transport import WatchedNetwork
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS, time_calls
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.remote_blocks import RemoteSequential
from shoal.client.runtime.client import find_network
from shoal.client.settings.client_config import ClientConfig
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.setting import Setting

_MAX_TOKENS = 2000
_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def measure(setting: Setting) -> list[Figure]:
    """Measure a client that trains alone, and then one beside it that decodes."""
    swarm = setting.start_swarm(setting.model)
    setting.say("plain transformers")
    speed, dtype = setting.reference.measure_training(*setting.effort.texts)
    name = f"plain transformers ({_SHORT_NAMES[dtype]}), forward and backward"
    reference = Figure(name, speed, "tok/s")
    return [*_measure_speed(setting, swarm, reference), *_measure_steps(setting, swarm)]


def train(blocks: RemoteSequential, model: BenchmarkModel, num_rows: int, num_tokens: int) -> None:
    """Take random texts forth through blocks, and random gradients back."""
    inputs_BTH = model.make_hidden(num_tokens, num_rows).requires_grad_()
    blocks(inputs_BTH).backward(model.make_hidden(num_tokens, num_rows))
    assert inputs_BTH.grad is not None


def _measure_speed(setting: Setting, swarm: LocalSwarm, reference: Figure) -> list[Figure]:
    texts, num_calls = setting.effort.texts, setting.effort.num_calls
    num_tokens = texts[0] * texts[1]

    def run_forward(blocks: RemoteSequential) -> None:
        with torch.no_grad():
            blocks(setting.model.make_hidden(texts[1], texts[0]))

    def run_both(blocks: RemoteSequential) -> None:
        train(blocks, setting.model, *texts)

    setting.say("forward")
    forward_seconds, _ = _time(swarm, setting.model, run_forward, num_calls)
    setting.say("forward and backward")
    seconds, num_bytes = _time(swarm, setting.model, run_both, num_calls)
    setting.say("int8 on the wire")
    int8_seconds, num_int8_bytes = _time(swarm, setting.model, run_both, 1, "int8")
    speed = num_tokens / seconds
    return [
        reference,
        Figure("through the swarm, forward", num_tokens / forward_seconds, "tok/s"),
        TargetFigure("through the swarm, forward and backward", speed, "tok/s", at_least(560)),
        TargetFigure("ratio to plain transformers", speed / reference.value, "x", at_least(0.7)),
        Figure("the same with int8 on the wire", num_tokens / int8_seconds, "tok/s"),
        Figure("what travels for a token", num_bytes / num_tokens, "bytes"),
        TargetFigure("with int8, against 16 bits", num_int8_bytes / num_bytes, "x", at_most(0.55)),
    ]


def _time(
    swarm: LocalSwarm,
    model: BenchmarkModel,
    call: Callable[[RemoteSequential], None],
    num_calls: int,
    wire_dtype: str = "auto",
) -> tuple[float, float]:
    """Return the median seconds of a call with remote blocks, and the bytes that it moves."""
    watched: list[WatchedNetwork] = []

    def connect(config: ClientConfig) -> WatchedNetwork:
        watched.append(WatchedNetwork(find_network(config)))
        return watched[0]

    with AutoDistributedModelForCausalLM.from_pretrained(
        model.directory,
        initial_peers=swarm.initial_peers,
        connect=connect,
        wire_dtype=wire_dtype,
    ) as remote:
        seconds = time_calls(lambda: call(remote.transformer.h), num_calls)
    return statistics.median(seconds), watched[0].transport.num_bytes / (num_calls + 1)


def _measure_steps(setting: Setting, swarm: LocalSwarm) -> list[Figure]:
    address = SwarmAddress.of(swarm, setting.model)
    setting.say("starting the client that trains")
    with _start_training(address, *setting.effort.texts) as training:
        training.read()
        quiet, beside = setting.run(_time_steps(setting, address, training))
        speed = training.read()
    quiet_p95, beside_p95 = compute_percentile(quiet, 95), compute_percentile(beside, 95)
    return [
        Figure("steps of a quiet swarm, median", 1000 * statistics.median(quiet), "ms"),
        Figure("steps of a quiet swarm, 95th percentile", 1000 * quiet_p95, "ms"),
        Figure("beside a client that trains, median", 1000 * statistics.median(beside), "ms"),
        Figure("beside a client that trains, 95th percentile", 1000 * beside_p95, "ms"),
        TargetFigure("ratio of the 95th percentiles", beside_p95 / quiet_p95, "x", at_most(2)),
        Figure("that client's speed meanwhile", speed, "tok/s"),
    ]


async def _time_steps(
    setting: Setting, address: SwarmAddress, training: HelperProcess
) -> tuple[list[float], list[float]]:
    """Return the seconds of steps, quiet and beside a client that trains."""
    model, seconds = setting.model, setting.effort.load_seconds
    async with join_swarm(address) as clients:
        session = clients.open(_MAX_TOKENS)
        await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
        await time_load([session], model, seconds / 5)  # warms up
        setting.say("steps of a quiet swarm")
        quiet, _ = await time_load([session], model, seconds)
        setting.say("steps beside a client that trains")
        training.tell("begin")
        await asyncio.sleep(seconds / 5)
        beside, _ = await time_load([session], model, 2 * seconds)
        training.tell("end")
        clients.check_nothing_was_lost()
    return quiet, beside


def _start_training(address: SwarmAddress, num_rows: int, num_tokens: int) -> HelperProcess:
    """Start the client that trains; it joins the swarm and waits."""
    directory, peers = str(address.model.directory), " ".join(address.initial_peers)
    return HelperProcess(__name__, directory, peers, str(num_rows), str(num_tokens))


def _main(directory: str, initial_peers: str, num_rows: str, num_tokens: str) -> None:
    torch.set_num_threads(1)
    model, peers = BenchmarkModel.open(Path(directory)), initial_peers.split()
    with AutoDistributedModelForCausalLM.from_pretrained(directory, initial_peers=peers) as remote:
        print(json.dumps("joined"), flush=True)
        sys.stdin.readline()
        is_over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), is_over.set()), daemon=True).start()
        started_at, num_batches = time.perf_counter(), 0
        while not is_over.is_set():
            inputs_BTH = model.make_hidden(int(num_tokens), int(num_rows)).requires_grad_()
            remote.transformer.h(inputs_BTH).sum().backward()
            num_batches += 1
        seconds = time.perf_counter() - started_at
    print(json.dumps(num_batches * int(num_rows) * int(num_tokens) / seconds), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
