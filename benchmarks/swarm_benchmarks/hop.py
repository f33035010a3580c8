"""What a step over one hop takes beside computing, against a bare gRPC echo of the same frame.

Both go over TLS from one event loop to a process with uvloop, in turn, so that both meet the same
machine. How long a peer computed stands in its answer.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from measuring.benchmark_model import BenchmarkModel
from measuring.clients import SwarmAddress, join_swarm, time_step
from measuring.grpc_echo import open_echo, start_echo
from measuring.report import TargetFigure, at_most
from measuring.watched_transport import WatchedNetwork, WatchedTransport
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS
from shoal.client.runtime.client import find_network
from shoal.client.session.session import RemoteSession
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.messages.codec import decode_frame
from shoal.protocol.messages.session import Output
from shoal.protocol.spans import Span
from swarm_benchmarks.setting import Setting

_NUM_TURNS = 10


@dataclass
class _Times:
    """Seconds of every step and of every echo."""

    steps: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)

    def to_figures(self, frame_bytes: int) -> list[Figure]:
        pairs = zip(self.steps, self.computing, strict=True)
        beside = statistics.median([step - computing for step, computing in pairs])
        echo = statistics.median(self.echoes)
        return [
            Figure("step", 1e6 * statistics.median(self.steps), "µs"),
            Figure("computing, as the peer says", 1e6 * statistics.median(self.computing), "µs"),
            Figure("waiting for the compute thread", 1e6 * statistics.median(self.waiting), "µs"),
            Figure("step without computing", 1e6 * beside, "µs"),
            Figure(f"bare gRPC echo of {frame_bytes} bytes", 1e6 * echo, "µs"),
            TargetFigure("ratio to the echo", beside / echo, "x", at_most(1.5)),
        ]


def measure(setting: Setting) -> list[Figure]:
    """Measure steps through one peer of the bundled model, and echoes."""
    swarm = setting.start_swarm(setting.tiny_model)
    address = SwarmAddress.of(swarm, setting.tiny_model)
    span = swarm.peers[0].span
    setting.say("starting the echo")
    with start_echo() as helper:
        echo = helper.read()
        return setting.run(_measure(setting, address, span, echo))


async def _measure(
    setting: Setting, address: SwarmAddress, span: Span, echo: tuple[int, str]
) -> list[Figure]:
    watched: list[WatchedNetwork] = []

    def watch(config: ClientConfig) -> WatchedNetwork:
        watched.append(WatchedNetwork(find_network(config)))
        return watched[0]

    num_steps = setting.effort.num_steps
    async with open_echo(*echo) as call, join_swarm(address, watch) as clients:
        transport = watched[0].transport
        session = clients.open(CONTEXT_TOKENS + (_NUM_TURNS + 1) * num_steps, span=span)
        await session.step(setting.tiny_model.make_hidden(CONTEXT_TOKENS))
        times = _Times()
        for turn in range(_NUM_TURNS + 1):
            setting.say(f"turn {turn} of {_NUM_TURNS}")
            times = times if turn > 1 else _Times()  # the first one warms up
            for _ in range(num_steps):
                await _note_step(times, session, setting.tiny_model, transport)
            for _ in range(num_steps):
                await _note_echo(times, call, transport.last_sent)
        clients.check_nothing_was_lost()
        return times.to_figures(len(transport.last_sent))


async def _note_step(
    times: _Times, session: RemoteSession, model: BenchmarkModel, transport: WatchedTransport
) -> None:
    times.steps.append(await time_step(session, model))
    answer = decode_frame(transport.last_received)
    assert isinstance(answer, Output)
    times.computing.append(answer.compute_seconds)
    times.waiting.append(answer.queue_seconds)


async def _note_echo(times: _Times, call: Any, frame: bytes) -> None:
    started_at = time.perf_counter()
    await call.write(frame)
    await call.read()
    times.echoes.append(time.perf_counter() - started_at)
