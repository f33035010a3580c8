"""Measures what this machine makes of its span: before the first announcement, and later again."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ...protocol.errors import CacheFullError, RefusedError
from ..engine.cache.kv_cache import SessionCache
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from ..engine.steps import StepWork

_logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 64
_DECODE_STEPS = 8

_NOTABLE_RATIO = 1.25
"""Less is chance: what else a machine does for a second moves a measurement as much."""


@dataclass(frozen=True)
class Throughput:
    """Steps and tokens per second of one session with the peer to itself."""

    decode_steps_per_second: float
    prefill_tokens_per_second: float

    def differs_notably(self, other: "Throughput") -> bool:
        """Return whether another measurement is worth telling.

        >>> Throughput(100.0, 900.0).differs_notably(Throughput(120.0, 1000.0))
        False
        >>> Throughput(100.0, 900.0).differs_notably(Throughput(100.0, 500.0))
        True
        """
        ratios = (
            self.decode_steps_per_second / other.decode_steps_per_second,
            self.prefill_tokens_per_second / other.prefill_tokens_per_second,
        )
        return not all(1 / _NOTABLE_RATIO <= ratio <= _NOTABLE_RATIO for ratio in ratios)


def measure_throughput(engine: Engine) -> Throughput:
    """Time a short prompt and some single tokens through all blocks. Runs where the engine runs.

    Takes about ten decode steps; the first of each kind warms up and is not counted. A device that
    captures steps has done so afterwards.
    """
    steps = _list_steps(engine)
    cache = engine.pool.open(1, sum(steps[-1]), engine.span)
    try:
        seconds = [_time_step(engine, cache, *step) for step in steps]
    finally:
        cache.close()
    _capture_steps(engine)
    return _derive_throughput(steps, seconds)


async def measure_between_work(
    compute: ComputeThread, engine: Engine, is_idle: Callable[[], bool]
) -> Throughput | None:
    """Measure again while a peer serves; return None where it is not idle from begin to end.

    The steps are queued as those of a client are, so that whoever comes waits for one at most.
    """
    steps, seconds = _list_steps(engine), list[float]()
    if not is_idle():
        return None
    try:
        cache = await compute.call(lambda: engine.pool.open(1, sum(steps[-1]), engine.span))
        try:
            for step in steps:
                work = _make_step(engine, cache, *step)
                seconds.append((await compute.submit(work)).compute_seconds)
                if not is_idle():
                    return None
        finally:
            compute.post(cache.close)
    except (CacheFullError, RefusedError) as error:
        _logger.info("the speed of this peer could not be measured again: %s", error)
        return None
    return _derive_throughput(steps, seconds)


def _list_steps(engine: Engine) -> list[tuple[int, int]]:
    """Return position and number of tokens of each step: a prompt twice, then single tokens."""
    num_prefill = min(_PREFILL_TOKENS, max(1, engine.spec.max_positions - _DECODE_STEPS))
    return [(0, num_prefill)] * 2 + [(num_prefill + index, 1) for index in range(_DECODE_STEPS)]


def _derive_throughput(steps: Sequence[tuple[int, int]], seconds: Sequence[float]) -> Throughput:
    """Leave out the first step of each kind, which warms up."""
    _, prefill_seconds, _, *decode_seconds = (max(each, 1e-9) for each in seconds)
    return Throughput(1 / median(decode_seconds), steps[0][1] / prefill_seconds)


def _capture_steps(engine: Engine) -> None:
    """Have a device capture and compile steps now, so that no client waits for that later."""
    for num_rows in engine.row_counts_to_capture:
        try:
            cache = engine.pool.open(num_rows, 1, engine.span)
        except CacheFullError:
            return  # nor will there be so many sessions
        try:
            _time_step(engine, cache, 0, 1)
        finally:
            cache.close()


def _make_step(engine: Engine, cache: SessionCache, position: int, num_tokens: int) -> StepWork:
    hidden_BTH = torch.zeros(cache.num_rows, num_tokens, engine.spec.hidden_size)
    return StepWork(
        cache=cache,
        position=position,
        hidden_BTH=hidden_BTH,
        row_map=None,
        last_token_only=True,
        decoded=num_tokens == 1,
    )


def _time_step(engine: Engine, cache: SessionCache, position: int, num_tokens: int) -> float:
    work = _make_step(engine, cache, position, num_tokens)
    started_at = time.perf_counter()
    (result,) = engine.execute([work])
    if isinstance(result, Exception):
        raise result
    return time.perf_counter() - started_at
