"""A peer that computes on another device dies; one on the CPU goes on with the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.usefixtures("plain_peers")]

NUM_NEW_TOKENS = 24
KILL_AFTER = 8
SPANS = [(0, 2), (2, 4)]


class Successor(BaseStreamer):
    """Has a peer on the CPU take the place of the first one after some tokens."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self._swarm = swarm
        self._num_left = KILL_AFTER + 1  # the prompt comes first, as one value

    def put(self, value: Tensor) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._swarm.config = replace(self._swarm.config, serve_arguments=())
            self._swarm.add(SPANS[0])
            self._swarm.peers[0].kill()

    def end(self) -> None:
        return


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        pytest.param("auto", "", marks=pytest.mark.thorough),  # here that is the CPU
        pytest.param(
            "cuda",
            "triton",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_peer_on_the_cpu_goes_on_with_the_words_of_another_device(
    tiny_models: Any, device: str, kernels: str
) -> None:
    tiny = tiny_models.get("llama")
    prompt = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(11))
    settings = {
        "max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS, "do_sample": False,
    }  # fmt: skip

    with LocalSwarm(
        tiny.directory, SPANS, weights="fp32", serve_arguments=("--device", device)
    ) as swarm:
        assert kernels in swarm.peers[0].facts["kernels"]
        model = AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers
        )
        with model, model.inference_session(max_length=64) as session:
            tokens: Any = model.generate(prompt, streamer=Successor(swarm), **settings)

            assert len(session.failovers) == 1

    assert torch.equal(tokens, tiny.reference.generate(prompt, **settings))
