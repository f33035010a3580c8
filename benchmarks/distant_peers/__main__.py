"""What delivery in chains, prompts in pieces and int8 on the wire bring where peers are far apart.

    make bench BENCHMARKS=distant_peers ARGS="prompt --rtt 100 --mbits 20"

Peers have one block each, so that a session over so many blocks has so many hops. What is compared
is asked in turn. Nothing else should run meanwhile.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from distant_peers.lines import LineConfig
from distant_peers.swarm import DistantSwarm, open_bare_line, start_distant_swarm
from measuring.benchmark_model import BenchmarkModel, make_wide_model, open_bundled_model
from measuring.clients import Clients, join_swarm, time_prompt, time_step
from measuring.program import run_program
from measuring.report import BenchRun, TargetFigure, at_most
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS
from shoal.client.session.session import RemoteSession
from shoal.client.trace.trace import AnsweredQuestion, Recorder, StepTaken
from shoal.protocol.errors import UnavailableError
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.spans import Span
from shoal.protocol.tensors import ELEMENT_BYTES, WireDtype

Measure = Callable[
    [DistantSwarm, "WanEffort", Callable[[str], None]], Coroutine[Any, Any, list[Figure]]
]

_PROMPT_HOPS = 3


@dataclass(frozen=True)
class WanEffort:
    """How much is measured."""

    num_steps: int = 40
    num_prompts: int = 5
    prompt_tokens: int = 2048
    hops: tuple[int, ...] = (3, 5)


class _WholePrompts(RemoteSession):
    """A session that sends every prompt in one piece."""

    def choose_piece_tokens(self) -> int:
        return 2**30


async def measure_decoding(
    swarm: DistantSwarm, effort: WanEffort, say: Callable[[str], None]
) -> list[Figure]:
    """Compare steps of one token in a star and in a chain with what the lines allow."""
    recorders: dict[tuple[int, str], Recorder] = {}
    ways: list[float] = []
    frame = bytes(swarm.address.model.hidden_size * ELEMENT_BYTES[WireDtype.BF16])
    async with AsyncExitStack() as stack:
        time_way = await stack.enter_async_context(open_bare_line(swarm.line))
        sessions: list[RemoteSession] = []
        for delivery in ("star", "chain"):
            clients = await stack.enter_async_context(join_swarm(swarm.address, delivery=delivery))
            for num_hops in effort.hops:
                say(f"{delivery} of {num_hops}")
                session = await _begin_decoding(clients, swarm.address.model, num_hops, effort)
                recorders[num_hops, delivery] = Recorder(SystemClock())
                session.state.recorder = recorders[num_hops, delivery]
                sessions.append(session)
        for number in range(effort.num_steps):
            say(f"step {number + 1} of {effort.num_steps}")
            ways.append(await time_way(frame))
            for session in sessions:
                await time_step(session, swarm.address.model)
        _check_nothing_was_lost(sessions)
    way = statistics.median(ways)
    figures = [Figure(f"one way of {len(frame)} bytes, without peers", 1000 * way, "ms")]
    for num_hops in effort.hops:
        times = {name: _Times.read(recorders[num_hops, name]) for name in ("star", "chain")}
        figures += _compare(num_hops, times, swarm.line.delay_seconds, way)
    return figures


async def _begin_decoding(
    clients: Clients, model: BenchmarkModel, num_hops: int, effort: WanEffort
) -> RemoteSession:
    session = clients.open(CONTEXT_TOKENS + 1 + effort.num_steps, span=Span(0, num_hops))
    await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
    await time_step(session, model)  # warms up
    return session


def _check_nothing_was_lost(sessions: Iterable[RemoteSession]) -> None:
    """Raise UnavailableError when a session had to change a hop: its times are no good."""
    for session in sessions:
        if session.failovers:
            raise UnavailableError(f"a hop was lost meanwhile: {session.failovers[0].reason}")


@dataclass(frozen=True)
class _Times:
    """Medians of the steps of one session, in seconds; of the parts, all hops together."""

    step: float
    compute: float
    queue: float

    @classmethod
    def read(cls, recorder: Recorder) -> "_Times":
        events = recorder.make_trace().events
        computing: dict[int, float] = defaultdict(float)
        waiting: dict[int, float] = defaultdict(float)
        for event in events:
            if isinstance(event, AnsweredQuestion):
                computing[event.step] += event.compute_seconds
                waiting[event.step] += event.queue_seconds
        return cls(
            statistics.median([event.seconds for event in events if isinstance(event, StepTaken)]),
            statistics.median(list(computing.values())),
            statistics.median(list(waiting.values())),
        )


def _compare(
    num_hops: int, times: Mapping[str, _Times], delay_seconds: float, way_seconds: float
) -> list[Figure]:
    """Return the figures of one number of hops; a star has two ways for each, a chain one more.

    A way takes longer than the delay: bytes have to be carried, and processes to wake up.
    """
    star, chain = times["star"], times["chain"]
    star_bound = 2 * num_hops * way_seconds + star.compute
    chain_bound = (num_hops + 1) * way_seconds + chain.compute
    bare_bound = (num_hops + 1) * delay_seconds + chain.compute
    rest = chain.step - chain_bound - chain.queue
    return [
        Figure(f"{num_hops} hops, star", 1000 * star.step, "ms"),
        Figure(f"{num_hops} hops, star, to its ways and computing", star.step / star_bound, "x"),
        Figure(f"{num_hops} hops, chain", 1000 * chain.step, "ms"),
        Figure(f"{num_hops} hops, chain, computing", 1000 * chain.compute, "ms"),
        Figure(f"{num_hops} hops, chain, waiting to be computed", 1000 * chain.queue, "ms"),
        Figure(
            f"{num_hops} hops, chain, to its ways and computing", chain.step / chain_bound, "x"
        ),
        TargetFigure(
            f"{num_hops} hops, chain, to mere delays and computing", chain.step / bare_bound, "x",
            at_most(1.1),
        ),
        Figure(f"{num_hops} hops, chain, the rest for each hop", 1000 * rest / num_hops, "ms"),
        Figure(f"{num_hops} hops, chain to star", chain.step / star.step, "x"),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Manner:
    """A way to send prompts, and what was measured of it."""

    name: str
    wire_dtype: str = "bf16"
    delivery: str = "chain"
    kind: type[RemoteSession] = RemoteSession


_MANNERS = (
    _Manner("whole", kind=_WholePrompts),
    _Manner("in pieces"),
    _Manner("in pieces, int8", wire_dtype="int8"),
    _Manner("in pieces, star", delivery="star"),
)


async def measure_prompts(
    swarm: DistantSwarm, effort: WanEffort, say: Callable[[str], None]
) -> list[Figure]:
    """Compare prompts sent whole and in pieces, in 16 bits and in 8, over a chain."""
    seconds: dict[str, list[float]] = {manner.name: [] for manner in _MANNERS}
    num_bytes: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        sessions: dict[str, RemoteSession] = {}
        for manner in _MANNERS:
            clients = await stack.enter_async_context(
                join_swarm(swarm.address, wire_dtype=manner.wire_dtype, delivery=manner.delivery)
            )
            sessions[manner.name] = clients.open(
                effort.prompt_tokens, span=Span(0, _PROMPT_HOPS), kind=manner.kind
            )
        for number in range(effort.num_prompts + 1):
            for name, session in sessions.items():
                say(f"{name}, {number} of {effort.num_prompts}")
                sent_before = swarm.lines.count_bytes()
                session.rollback(0)
                took = await time_prompt(session, swarm.address.model, effort.prompt_tokens)
                sent = swarm.lines.count_bytes()
                if number > 0:  # the first one warms up
                    seconds[name].append(took)
                    num_bytes[name] = max(
                        after[0] - before[0]
                        for before, after in zip(sent_before, sent, strict=True)
                    )
        _check_nothing_was_lost(sessions.values())
    return _compare_manners(swarm, effort, seconds, num_bytes)


def _compare_manners(
    swarm: DistantSwarm,
    effort: WanEffort,
    seconds: Mapping[str, Sequence[float]],
    num_bytes: Mapping[str, float],
) -> list[Figure]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    figures: list[Figure] = []
    for name, median in medians.items():
        ways = (_PROMPT_HOPS + 1) * swarm.line.delay_seconds
        bound = ways + num_bytes[name] / swarm.line.bytes_per_second
        figures += [
            Figure(f"{effort.prompt_tokens} tokens {name}", 1000 * median, "ms"),
            Figure(f"{name}: bytes over each line", num_bytes[name] / 2**20, "MiB"),
            Figure(f"{name}, to delays and one line's time", median / bound, "x"),
        ]
    ratio = medians["in pieces"] / medians["whole"]
    int8_ratio = medians["in pieces, int8"] / medians["in pieces"]
    return [
        *figures,
        TargetFigure("in pieces, to whole", ratio, "x", at_most(0.5)),
        Figure("int8 on the wire, to bf16", int8_ratio, "x"),
    ]


PARTS: dict[str, tuple[str, Measure]] = {
    "decode": ("Steps of one token, hidden states in and out", measure_decoding),
    "prompt": ("A prompt over three hops, in a chain", measure_prompts),
}
QUICK = WanEffort(num_steps=3, num_prompts=1, prompt_tokens=256)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--rtt", type=float, default=40.0, metavar="MS", help="round trip of a line"
    )
    parser.add_argument("--mbits", type=float, default=100.0, help="of a line, each way")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="MS", help="at most, each way")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser.parse_args()


def main() -> int:
    """Measure and report; return 1 when a part could not be measured, else 0."""
    options = read_options()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    effort = QUICK if options.quick else WanEffort()
    line = LineConfig(
        options.rtt / 2000, options.mbits * 1e6 / 8, options.jitter / 1000, options.seed
    )
    model = open_bundled_model() if options.quick else make_wide_model(max(effort.hops))
    lines = f"lines of {options.rtt:g} ms and {options.mbits:g} Mbit/s"
    bench = BenchRun(f"{describe_machine()}; {lines}", options.quick, options.json)
    with start_distant_swarm(model, max(effort.hops), line) as swarm:
        for name in options.parts or PARTS:
            title, measure = PARTS[name]
            bench.measure(
                name, title, lambda measure=measure: asyncio.run(measure(swarm, effort, bench.say))
            )
    return bench.finish()


if __name__ == "__main__":
    run_program(main)
