"""A peer is asked to stop while clients generate: nobody notices, and it is gone soon.

Real processes, fp32. The reference is plain transformers on the same weights.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = ((0, 2), (0, 2), (2, 4), (2, 4))
NUM_CLIENTS = 3
NUM_NEW_TOKENS = 200
STOP_AFTER = 20
DRAIN_SECONDS = 120.0
SOON_SECONDS = 30.0
"""Far less than the time to drain, and enough for a busy machine."""


class MeetAt(BaseStreamer):
    """Waits for the others when `generate` has produced so many tokens."""

    def __init__(self, num_tokens: int, barrier: threading.Barrier) -> None:
        self._num_left = num_tokens + 1  # the prompt comes first, as one value
        self._barrier = barrier

    def put(self, value: Tensor) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._barrier.wait(120)

    def end(self) -> None:
        return


def draw_prompt(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 128, (1, 10 + 7 * number), generator=generator)


def generate(model: Any, inputs: Tensor, **settings: Any) -> Tensor:
    return model.generate(
        inputs,
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        **settings,
    )


@torch.no_grad()
def choose_greedily(model: Any, text: Tensor) -> Tensor:
    """Return the new tokens of a text as a model chooses them, each behind those before it.

    In one pass: to write them one by one takes longer than the swarm does.
    """
    logits = model(text).logits[:, -NUM_NEW_TOKENS - 1 : -1]
    logits[..., model.config.eos_token_id] = -torch.inf  # no text is over before
    return logits.argmax(dim=-1)


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize("delivery", ["chain", pytest.param("star", marks=pytest.mark.thorough)])
def test_peer_that_is_asked_to_stop_is_left_by_all_its_clients(
    tiny_models: Any, delivery: str, index: int
) -> None:
    tiny = tiny_models.get("llama")
    with (
        LocalSwarm(
            tiny.directory, spans=SPANS, weights="fp32", drain_seconds=DRAIN_SECONDS
        ) as swarm,
        ExitStack() as stack,
        ThreadPoolExecutor(NUM_CLIENTS) as threads,
    ):
        models = [
            stack.enter_context(
                AutoDistributedModelForCausalLM.from_pretrained(
                    tiny.directory, initial_peers=swarm.initial_peers, delivery=delivery
                )
            )
            for _ in range(NUM_CLIENTS)
        ]
        sessions = [
            stack.enter_context(model.inference_session(max_length=400)) for model in models
        ]
        peer_ids: Counter[Any] = Counter()

        def stop_a_peer() -> None:
            peer_ids.update(session.hops[index].peer.peer_id for session in sessions)
            swarm.find(peer_ids.most_common(1)[0][0]).terminate()

        barrier = threading.Barrier(NUM_CLIENTS, action=stop_a_peer)

        def write(number: int) -> Tensor:
            streamer = MeetAt(STOP_AFTER, barrier)
            inputs = draw_prompt(number)
            return generate(models[number], inputs, session=sessions[number], streamer=streamer)

        texts = list(threads.map(write, range(NUM_CLIENTS)))

        leaving, num_sessions = peer_ids.most_common(1)[0]
        assert swarm.find(leaving).wait(SOON_SECONDS) == 0
        assert sum(len(session.handoffs) for session in sessions) == num_sessions
        assert [session.failovers for session in sessions] == [()] * NUM_CLIENTS
    for number, text in enumerate(texts):
        prompt = draw_prompt(number)
        assert torch.equal(text[:, : prompt.shape[1]], prompt)
        assert torch.equal(text[:, prompt.shape[1] :], choose_greedily(tiny.reference, text))


def test_peer_without_a_span_takes_what_is_needed_and_can_be_drained(tiny_models: Any) -> None:
    tiny = tiny_models.get("llama")
    with LocalSwarm(tiny.directory, spans=[(0, 2)], weights="fp32", drain_seconds=5.0) as swarm:
        peer = swarm.add()

        assert peer.span == Span(0, 4)
        assert peer.drain() == 0


def test_who_asks_twice_does_not_wait_for_sessions(tiny_models: Any) -> None:
    tiny = tiny_models.get("llama")
    serve_arguments = ("--drain", str(DRAIN_SECONDS))
    with LocalSwarm(
        tiny.directory, spans=[(0, 4)], weights="fp32", serve_arguments=serve_arguments
    ) as swarm:
        (peer,) = swarm.peers
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers
        )
        with model, model.inference_session(max_length=64):
            model.generate(draw_prompt(0), max_new_tokens=1)

            peer.terminate()
            peer.wait_for("draining", time.monotonic() + SOON_SECONDS)
            peer.terminate()

            assert peer.wait(SOON_SECONDS) == 0
