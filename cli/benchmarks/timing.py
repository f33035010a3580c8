"""Stop watches for calls and for sessions."""

import asyncio
import time
from collections.abc import Callable, Sequence

from ...client.session.session import RemoteSession
from .benchmark_model import BenchmarkModel


def time_calls(call: Callable[[], object], num_calls: int) -> list[float]:
    """Return the seconds of several calls; one more before them warms up and is not counted."""
    call()
    return [_time(call) for _ in range(num_calls)]


def _time(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


async def time_prompt(session: RemoteSession, model: BenchmarkModel, num_tokens: int) -> float:
    """Return the seconds until the last token of a new prompt is answered."""
    hidden_BTH = model.make_hidden(num_tokens)
    started_at = time.perf_counter()
    await session.step(hidden_BTH, last_token_only=True)
    return time.perf_counter() - started_at


async def time_steps(session: RemoteSession, model: BenchmarkModel, num_steps: int) -> list[float]:
    """Return the seconds of steps of one token."""
    return [await time_step(session, model) for _ in range(num_steps)]


async def time_step(session: RemoteSession, model: BenchmarkModel) -> float:
    """Return the seconds of one step of one token."""
    hidden_BTH = model.make_hidden(1)
    started_at = time.perf_counter()
    await session.step(hidden_BTH, is_decoded=True)
    return time.perf_counter() - started_at


async def time_load(
    sessions: Sequence[RemoteSession], model: BenchmarkModel, load_seconds: float
) -> tuple[list[float], float]:
    """Let all sessions step for a while, each as fast as it is answered.

    Returns the seconds of every step, and those that it took together.
    """
    started_at = time.perf_counter()
    seconds: list[float] = []

    async def live(session: RemoteSession) -> None:
        while time.perf_counter() < started_at + load_seconds:
            seconds.append(await time_step(session, model))

    await asyncio.gather(*map(live, sessions))
    return seconds, time.perf_counter() - started_at
