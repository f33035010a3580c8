"""Many sessions at once on two peers, against plain transformers with as many rows in one batch.

Peers: two processes of 8 blocks, int8, one thread each. All clients are in this process. A step is
one token's hidden state in and out through both peers, without embedding and head; the reference
generates, in bf16 with two threads, before the peers are started.
"""

import asyncio
import statistics
import time
from typing import Any

import torch
from _report import Figure, make_benchmark_model, measure_seconds, parse_arguments, report
from transformers import AutoModelForCausalLM

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm import LocalSwarm
from shoal.protocol.spans import Span

CONTEXT_TOKENS = 16
NUM_REFERENCE_TOKENS = 16
SECONDS = 5.0
SESSIONS = (1, 2, 4, 8, 16, 32)


def measure_reference(batch_size: int) -> float:
    """Return the tokens per second of plain transformers over all rows of a batch."""
    torch.set_num_threads(2)
    model: Any = AutoModelForCausalLM.from_pretrained(make_benchmark_model(), dtype=torch.bfloat16)
    prompt = torch.randint(0, 32000, (batch_size, CONTEXT_TOKENS))
    settings = {
        "max_new_tokens": NUM_REFERENCE_TOKENS,
        "min_new_tokens": NUM_REFERENCE_TOKENS,
        "do_sample": False,
    }
    with torch.inference_mode():
        seconds = measure_seconds(lambda: model.generate(prompt, **settings), 3)
    return batch_size * NUM_REFERENCE_TOKENS / seconds


async def live(remote: Any, until: float, seconds: list[float]) -> None:
    """Step one session until the time is over."""
    hidden_BTH = torch.randn(1, 1, 1024) * 0.02
    while time.perf_counter() < until:
        started_at = time.perf_counter()
        await remote.step(hidden_BTH, is_decoded=True)
        seconds.append(time.perf_counter() - started_at)


def measure_sessions(model: Any, num_sessions: int) -> tuple[float, list[float]]:
    """Return steps per second of all sessions together, and the seconds of every step."""
    client = model._client
    sessions = [client.open_session(2000, Span(0, 16)) for _ in range(num_sessions)]
    prompt_BTH = torch.randn(1, CONTEXT_TOKENS, 1024) * 0.02
    for session in sessions:
        session.step(prompt_BTH, last_token_only=True)
    seconds: list[float] = []

    async def live_all() -> None:
        until = time.perf_counter() + SECONDS
        await asyncio.gather(*(live(session._remote, until, seconds) for session in sessions))

    started_at = time.perf_counter()
    client._portal.run(live_all())
    steps_per_second = len(seconds) / (time.perf_counter() - started_at)
    for session in sessions:
        session.close()
    return steps_per_second, seconds


def main() -> None:
    """Measure everything and print it."""
    options = parse_arguments(__doc__ or "")
    torch.manual_seed(0)
    one_row, many_rows = measure_reference(1), measure_reference(16)
    torch.set_num_threads(1)
    directory = make_benchmark_model()
    figures = [
        Figure("plain transformers, bf16, 2 threads, 1 row", one_row, "tok/s"),
        Figure("plain transformers, bf16, 2 threads, 16 rows", many_rows, "tok/s"),
    ]
    with LocalSwarm(directory, spans=[(0, 8), (8, 16)], weights="int8") as swarm:
        connect = AutoDistributedModelForCausalLM.from_pretrained
        model = connect(directory, initial_peers=swarm.initial_peers)
        measure_sessions(model, 2)  # warms up
        p95_of_one = 0.0
        for num_sessions in SESSIONS:
            total, seconds = measure_sessions(model, num_sessions)
            p95 = statistics.quantiles(seconds, n=20)[-1]
            p95_of_one = p95_of_one or p95
            name = f"{num_sessions} session{'s' if num_sessions > 1 else ''}"
            figures.append(Figure(f"{name}, together", total, "steps/s"))
            figures.append(Figure("  median step", 1000 * statistics.median(seconds), "ms"))
            figures.append(Figure("  95th percentile", 1000 * p95, "ms"))
            if num_sessions == 1:
                ratio = total / one_row
                figures.append(Figure("  ratio to 1 row", ratio, "x", ">= 2", ratio >= 2))
            if num_sessions == 8:
                ratio = p95 / p95_of_one
                figures.append(Figure("  ratio to one session", ratio, "x", "<= 3", ratio <= 3))
            if num_sessions == 16:
                ratio = total / many_rows
                figures.append(Figure("  ratio to 16 rows", ratio, "x", ">= 1", ratio >= 1))
        model.close()
    report("Many sessions, 2 peers x 8 blocks, int8, 1 thread each", figures, options.json)


if __name__ == "__main__":
    main()
