"""Measures the speed of a running swarm from this machine: steps, prompts and text.

Hidden states are random and never sent twice, so that caches of peers cannot help.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .figure import Figure

if TYPE_CHECKING:
    from ...client.model.causal_lm import DistributedCausalLM

CONTEXT_TOKENS = 16
"""Length of a prompt where only the steps after it are measured."""

_PROMPT_TOKENS = 512
_NUM_STEPS, _NUM_CALLS, _NUM_GENERATED = 100, 3, 64
_HIDDEN_SCALE = 0.02
"""About the standard deviation of embeddings."""


def measure_swarm(remote: "DistributedCausalLM", say: Callable[[str], None]) -> list[Figure]:
    """Measure a distributed model in its swarm; raises RouteError when blocks are missing."""
    say("steps")
    times = time_session(remote, _NUM_STEPS)
    say("prompts")
    prompt_tokens, prompt_speed = _measure_prompt(remote, _NUM_CALLS)
    say("texts")
    text_speed = measure_text(remote, _NUM_GENERATED, _NUM_CALLS)
    median = statistics.median(times.step_seconds)
    p95 = statistics.quantiles(times.step_seconds, n=20, method="inclusive")[-1]
    return [
        Figure("peers on the way", times.num_hops, ""),
        Figure(f"opening a session, prompt of {CONTEXT_TOKENS}", 1000 * times.open_seconds, "ms"),
        Figure("steps", 1 / median, "steps/s"),
        Figure("median step", 1000 * median, "ms"),
        Figure("95th percentile of a step", 1000 * p95, "ms"),
        Figure("peers lost meanwhile", times.num_failovers, ""),
        Figure(f"prompt of {prompt_tokens}", prompt_speed, "tok/s"),
        Figure("generate, with embedding and head", text_speed, "tok/s"),
    ]


@dataclass(frozen=True)
class SessionTimes:
    """One session: opening it with a short prompt, then steps of one token."""

    open_seconds: float
    step_seconds: list[float]
    num_hops: int
    num_failovers: int


def time_session(remote: "DistributedCausalLM", num_steps: int) -> SessionTimes:
    """Time a session of a distributed model, without embedding and head."""
    hidden_size = remote.config.hidden_size
    step_seconds: list[float] = []
    started_at = time.perf_counter()
    with remote.inference_session(max_length=CONTEXT_TOKENS + num_steps) as session:
        session.step(make_hidden(hidden_size, CONTEXT_TOKENS), last_token_only=True)
        open_seconds = time.perf_counter() - started_at
        for _ in range(num_steps):
            hidden_BTH = make_hidden(hidden_size, 1)
            started_at = time.perf_counter()
            session.step(hidden_BTH)
            step_seconds.append(time.perf_counter() - started_at)
        return SessionTimes(open_seconds, step_seconds, len(session.hops), len(session.failovers))


def _measure_prompt(remote: "DistributedCausalLM", num_calls: int) -> tuple[int, float]:
    max_positions = getattr(remote.config, "max_position_embeddings", None)
    num_tokens = min(_PROMPT_TOKENS, max_positions or _PROMPT_TOKENS)
    with remote.inference_session(max_length=num_tokens) as session:

        def fill() -> None:
            session.rollback(0)
            hidden_BTH = make_hidden(remote.config.hidden_size, num_tokens)
            session.step(hidden_BTH, last_token_only=True)

        return num_tokens, num_tokens / statistics.median(time_calls(fill, num_calls))


def measure_text(remote: "DistributedCausalLM", num_tokens: int, num_calls: int) -> float:
    """Return the tokens per second of `generate` behind a short prompt."""
    tokens_1T = torch.randint(remote.config.vocab_size, (1, CONTEXT_TOKENS))
    settings = make_text_settings(tokens_1T, num_tokens)
    seconds = time_calls(lambda: remote.generate(tokens_1T, **settings), num_calls)
    return num_tokens / statistics.median(seconds)


def make_hidden(hidden_size: int, num_tokens: int, num_rows: int = 1) -> Tensor:
    """Return new random hidden states [B, T, H]: never the same ones, which peers may cache."""
    return torch.randn(num_rows, num_tokens, hidden_size) * _HIDDEN_SCALE


def make_text_settings(tokens_BT: Tensor, num_tokens: int) -> dict[str, Any]:
    """Return arguments that make `generate` write exactly this many tokens behind a prompt."""
    return {
        "attention_mask": torch.ones_like(tokens_BT),
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
    }


def time_calls(call: Callable[[], object], num_calls: int) -> list[float]:
    """Return the seconds of several calls; one more before them warms up and is not counted."""
    call()
    return [_time(call) for _ in range(num_calls)]


def _time(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
