"""One session on two peers against plain transformers, and what a lost peer costs.

Peers: two processes of 8 blocks, int8, one thread each. Reference: transformers in bf16 with two
threads, in the same run, before the peers are started. A step is one token's hidden state in and
out through all peers, without embedding and head.
"""

import statistics
import time
from typing import Any

import torch
from _report import Figure, make_benchmark_model, measure_seconds, parse_arguments, report
from transformers import AutoModelForCausalLM

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm import LocalSwarm

NUM_TOKENS = 64
CONTEXT_TOKENS = 300


def measure_reference(prompt: torch.Tensor) -> tuple[float, float]:
    """Return tokens per second of plain transformers: generating, and on a prompt of 512."""
    torch.set_num_threads(2)
    model: Any = AutoModelForCausalLM.from_pretrained(make_benchmark_model(), dtype=torch.bfloat16)
    settings = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    with torch.inference_mode():
        seconds = measure_seconds(lambda: model.generate(prompt, **settings), 3)
        long_prompt = torch.randint(0, 32000, (1, 512))
        prefill_seconds = measure_seconds(lambda: model.model(long_prompt), 3)
    return NUM_TOKENS / seconds, 512 / prefill_seconds


def measure_steps(model: Any, num_steps: int, context: int) -> list[float]:
    """Return the seconds of single steps behind a context."""
    hidden_BTH = torch.randn(1, context + num_steps + 1, 1024) * 0.02
    with model.inference_session(max_length=context + num_steps + 1) as session:
        session.step(hidden_BTH[:, :context], last_token_only=True)
        seconds = []
        for index in range(context, context + num_steps):
            started_at = time.perf_counter()
            session.step(hidden_BTH[:, index : index + 1])
            seconds.append(time.perf_counter() - started_at)
    return seconds


def measure_prefill(model: Any, num_tokens: int) -> float:
    """Return the seconds of a prompt's hidden states through all peers."""
    hidden_BTH = torch.randn(1, num_tokens, 1024) * 0.02
    with model.inference_session(max_length=num_tokens) as session:

        def prefill() -> None:
            session.position = 0
            session.step(hidden_BTH, last_token_only=True)

        return measure_seconds(prefill, 5)


def measure_loss(swarm: LocalSwarm, model: Any, action: str) -> float:
    """Return the seconds from killing (or pausing) a peer in use to the next step's answer."""
    hidden_BTH = torch.randn(1, CONTEXT_TOKENS + 40, 1024) * 0.02
    with model.inference_session(max_length=CONTEXT_TOKENS + 40) as session:
        session.step(hidden_BTH[:, : CONTEXT_TOKENS - 30], last_token_only=True)
        for index in range(CONTEXT_TOKENS - 30, CONTEXT_TOKENS):
            session.step(hidden_BTH[:, index : index + 1])
        victim = swarm.find(session.hops[1].peer.peer_id)
        started_at = time.perf_counter()
        getattr(victim, action)()
        session.step(hidden_BTH[:, CONTEXT_TOKENS : CONTEXT_TOKENS + 1])
        seconds = time.perf_counter() - started_at
        assert session.failovers, "the peer was lost and nothing happened"
    return seconds


def main() -> None:
    """Measure everything and print it."""
    options = parse_arguments(__doc__ or "")
    torch.manual_seed(0)
    prompt = torch.randint(0, 32000, (1, 16))
    reference, reference_prefill = measure_reference(prompt)
    torch.set_num_threads(1)
    directory = make_benchmark_model()
    with LocalSwarm(directory, spans=[(0, 8), (8, 16)], weights="int8") as swarm:
        connect = AutoDistributedModelForCausalLM.from_pretrained
        model = connect(directory, initial_peers=swarm.initial_peers)
        settings = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        step_seconds = measure_steps(model, 200, 16)
        steps = 1 / statistics.median(step_seconds)
        generated = NUM_TOKENS / measure_seconds(lambda: model.generate(prompt, **settings), 3)
        prefill = 512 / measure_prefill(model, 512)
        replicas = [swarm.add((8, 16), wait=False) for _ in range(2)]
        swarm.wait_until_online(replicas)
        model.close()
        model = connect(directory, initial_peers=swarm.initial_peers)  # knows the replicas
        kill_seconds = measure_loss(swarm, model, "kill")
        pause_seconds = measure_loss(swarm, model, "pause")
        model.close()
    slowest = statistics.quantiles(step_seconds, n=20)[-1]
    ratio = steps / reference
    report(
        "One session, 2 peers x 8 blocks, int8, 1 thread each",
        [
            Figure("plain transformers, bf16, 2 threads", reference, "tok/s"),
            Figure("steps through the swarm", steps, "steps/s"),
            Figure("  ratio to plain transformers", ratio, "x", ">= 1", ratio >= 1),
            Figure("  95th percentile of a step", 1000 * slowest, "ms"),
            Figure("generate, with embedding and head", generated, "tok/s"),
            Figure("plain transformers, prompt of 512", reference_prefill, "tok/s"),
            Figure("prompt of 512 through the swarm", prefill, "tok/s"),
            Figure("  ratio to plain transformers", prefill / reference_prefill, "x"),
            Figure("kill to next step, 300 tokens", kill_seconds, "s", "< 1", kill_seconds < 1),
            Figure("pause to next step, 300 tokens", pause_seconds, "s", "< 5", pause_seconds < 5),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
