"""Decoding through two peers: one session, many at once, and behind a long text.

A step is one token's hidden state in and out through all peers, without embedding and head.
"""

import statistics

from measuring.clients import Clients, SwarmAddress, join_swarm, time_load, time_steps
from measuring.report import TargetFigure, at_least, compute_percentile
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS, measure_text, time_session
from shoal.client import AutoDistributedModelForCausalLM
from swarm_benchmarks.curve import CurvePoint, SessionsCurve
from swarm_benchmarks.setting import Setting

_BATCH_SIZES = (1, 16)
_MAX_TOKENS = 2000
_TURN_STEPS = 10


def measure_single(setting: Setting) -> list[Figure]:
    """Compare one session, as a script has it, with plain transformers: steps, and whole texts."""
    model, effort = setting.model, setting.effort
    swarm = setting.start_swarm(model)
    setting.say("plain transformers")
    reference = setting.reference.measure_generate(1, effort.num_generated)
    connect = AutoDistributedModelForCausalLM.from_pretrained
    with connect(model.directory, initial_peers=swarm.initial_peers) as remote:
        setting.say("steps")
        seconds = time_session(remote, 2 * effort.num_steps).step_seconds
        setting.say("texts")
        generated = measure_text(remote, effort.num_generated, effort.num_calls)
    steps_per_second = 1 / statistics.median(seconds)
    return [
        Figure("plain transformers, generate", reference, "tok/s"),
        Figure("steps through the swarm", steps_per_second, "steps/s"),
        TargetFigure("ratio to plain transformers", steps_per_second / reference, "x", at_least(2)),
        Figure("95th percentile of a step", 1000 * compute_percentile(seconds, 95), "ms"),
        Figure("generate, with embedding and head", generated, "tok/s"),
    ]


def measure_sessions(setting: Setting) -> list[Figure]:
    """Compare many sessions at once with plain transformers, with as many rows in one batch."""
    swarm = setting.start_swarm(setting.model)
    setting.say("plain transformers")
    num_tokens = setting.effort.num_generated // 2
    reference = {
        num_rows: setting.reference.measure_generate(num_rows, num_tokens)
        for num_rows in _BATCH_SIZES
    }
    points = setting.run(_measure_points(setting, SwarmAddress.of(swarm, setting.model)))
    setting.curve = SessionsCurve(tuple(points), reference)
    return setting.curve.to_figures()


async def _measure_points(setting: Setting, address: SwarmAddress) -> list[CurvePoint]:
    async with join_swarm(address) as clients:
        await _measure_point(setting, clients, 2)  # warms up
        return [
            await _measure_point(setting, clients, num_sessions)
            for num_sessions in setting.effort.session_counts
        ]


async def _measure_point(setting: Setting, clients: Clients, num_sessions: int) -> CurvePoint:
    setting.say(f"{num_sessions} at once")
    model = setting.model
    sessions = [clients.open(_MAX_TOKENS) for _ in range(num_sessions)]
    for session in sessions:
        await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
    step_seconds, seconds = await time_load(sessions, model, setting.effort.load_seconds)
    clients.check_nothing_was_lost()
    await clients.close_sessions()
    return CurvePoint.of(num_sessions, step_seconds, seconds)


def measure_context(setting: Setting) -> list[Figure]:
    """Compare steps behind a long text and a short one, in turn: both meet the same machine."""
    swarm = setting.start_swarm(setting.model)
    short, long = setting.effort.contexts
    short_seconds, long_seconds = setting.run(
        _measure_contexts(setting, SwarmAddress.of(swarm, setting.model))
    )
    return [
        Figure(f"behind {short} tokens", 1 / short_seconds, "steps/s"),
        Figure(f"behind {long} tokens", 1 / long_seconds, "steps/s"),
        TargetFigure("ratio of the two speeds", short_seconds / long_seconds, "x", at_least(0.6)),
    ]


async def _measure_contexts(setting: Setting, address: SwarmAddress) -> list[float]:
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
    return [statistics.median(noted) for noted in seconds]
