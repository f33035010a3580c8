"""Measures what this machine makes of its span, once, before the first announcement."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from ...protocol.errors import CacheFullError
from ..engine.cache.kv_cache import SessionCache
from ..engine.engine import Engine
from ..engine.steps import StepWork

_PREFILL_TOKENS = 64
_DECODE_STEPS = 8


@dataclass(frozen=True)
class Throughput:
    """Steps and tokens per second of one session with the peer to itself."""

    decode_steps_per_second: float
    prefill_tokens_per_second: float


def measure_throughput(engine: Engine) -> Throughput:
    """Time a short prompt and some single tokens through all blocks. Runs where the engine runs.

    Takes about ten decode steps; the first of each kind warms up and is not counted. A device that
    captures steps has done so afterwards.
    """
    num_prefill = min(_PREFILL_TOKENS, max(1, engine.spec.max_positions - _DECODE_STEPS))
    cache = engine.pool.open(1, num_prefill + _DECODE_STEPS, engine.span)
    try:
        _time_step(engine, cache, 0, num_prefill)
        prefill_seconds = _time_step(engine, cache, 0, num_prefill)
        decode_seconds = [
            _time_step(engine, cache, num_prefill + index, 1) for index in range(_DECODE_STEPS)
        ]
    finally:
        cache.close()
    _capture_steps(engine)
    return Throughput(1 / median(decode_seconds[1:]), num_prefill / prefill_seconds)


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


def _time_step(engine: Engine, cache: SessionCache, position: int, num_tokens: int) -> float:
    hidden_BTH = torch.zeros(cache.num_rows, num_tokens, engine.spec.hidden_size)
    work = StepWork(
        cache=cache,
        position=position,
        hidden_BTH=hidden_BTH,
        row_map=None,
        last_token_only=True,
        decoded=num_tokens == 1,
    )
    started_at = time.perf_counter()
    (result,) = engine.execute([work])
    if isinstance(result, Exception):
        raise result
    return max(time.perf_counter() - started_at, 1e-9)
