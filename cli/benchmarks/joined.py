"""What a swarm that runs already gives to a client on this machine: text, steps and prompts.

Hidden states are random and never sent twice, so that nothing a peer remembers can help.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from ...client import AutoDistributedModelForCausalLM
from ..terminal.joining import Joining
from .effort import Effort
from .figures import Figure, compute_median, compute_percentile
from .reference import CONTEXT_TOKENS, make_text_settings
from .report import Findings
from .timing import time_calls

_PROMPT_TOKENS = 512


def measure(model: str, joining: Joining, effort: Effort, say: Callable[[str], None]) -> Findings:
    """Measure a swarm. Raises what opening a model does, RouteError when blocks are missing."""
    say("joining")
    connect = AutoDistributedModelForCausalLM.from_pretrained
    with connect(model, initial_peers=joining.initial_peers, join=joining.join) as remote:
        say("steps")
        figures = _measure_steps(remote, effort.num_steps)
        say("prompts")
        figures.append(_measure_prompt(remote, effort.num_calls))
        say("texts")
        figures.append(_measure_text(remote, effort))
    return Findings(figures)


def _measure_steps(remote: Any, num_steps: int) -> list[Figure]:
    seconds: list[float] = []
    started_at = time.perf_counter()
    with remote.inference_session(max_length=CONTEXT_TOKENS + num_steps) as session:
        session.step(_make_hidden(remote, CONTEXT_TOKENS), last_token_only=True)
        first = time.perf_counter() - started_at
        for _ in range(num_steps):
            hidden_BTH = _make_hidden(remote, 1)
            started_at = time.perf_counter()
            session.step(hidden_BTH)
            seconds.append(time.perf_counter() - started_at)
        num_hops, num_failovers = len(session.hops), len(session.failovers)
    return [
        Figure("peers on the way", num_hops, ""),
        Figure(f"opening a session, prompt of {CONTEXT_TOKENS}", 1000 * first, "ms"),
        Figure("steps", 1 / compute_median(seconds), "steps/s"),
        Figure("median step", 1000 * compute_median(seconds), "ms"),
        Figure("95th percentile of a step", 1000 * compute_percentile(seconds, 95), "ms"),
        Figure("peers lost meanwhile", num_failovers, ""),
    ]


def _measure_prompt(remote: Any, num_calls: int) -> Figure:
    max_positions = getattr(remote.config, "max_position_embeddings", None)
    num_tokens = min(_PROMPT_TOKENS, max_positions or _PROMPT_TOKENS)
    with remote.inference_session(max_length=num_tokens) as session:

        def fill() -> None:
            session.rollback(0)
            session.step(_make_hidden(remote, num_tokens), last_token_only=True)

        speed = num_tokens / compute_median(time_calls(fill, num_calls))
    return Figure(f"prompt of {num_tokens}", speed, "tok/s")


def _measure_text(remote: Any, effort: Effort) -> Figure:
    num_tokens = effort.num_generated
    tokens_1T = torch.randint(remote.config.vocab_size, (1, CONTEXT_TOKENS))
    settings = make_text_settings(tokens_1T, num_tokens)
    seconds = time_calls(lambda: remote.generate(tokens_1T, **settings), effort.num_calls)
    speed = num_tokens / compute_median(seconds)
    return Figure("generate, with embedding and head", speed, "tok/s")


def _make_hidden(remote: Any, num_tokens: int) -> torch.Tensor:
    return torch.randn(1, num_tokens, remote.config.hidden_size)
