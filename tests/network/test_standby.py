"""A peer is killed in mid-sentence whose standby has done all it did: the same words, no replay.

Real processes, fp32. The reference is plain transformers on the same weights.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = ((0, 2), (0, 2), (2, 4), (2, 4))
NUM_TOKENS = 24
READY_SECONDS = 60.0


def generate(model: Any, prompt: Tensor | None, num_tokens: int = NUM_TOKENS) -> Tensor:
    return model.generate(
        prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )


def test_killed_hops_leave_their_places_to_their_standbys(tiny_models: Any) -> None:
    tiny = tiny_models.get("llama")
    prompt = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(3))
    with (
        LocalSwarm(tiny.directory, spans=SPANS, weights="fp32") as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers, standby=True, seed=0
        ) as model,
        model.inference_session(max_length=12 + 3 * NUM_TOKENS) as session,
    ):
        texts = [generate(model, prompt)]
        deadline = time.monotonic() + READY_SECONDS
        while len(session.standbys) < 2:
            assert time.monotonic() < deadline, "no standbys for the hops"
            time.sleep(0.05)
        for index in (1, 0):
            swarm.find(session.hops[index].peer.peer_id).kill()
            texts.append(generate(model, None))
        failovers = session.failovers

    expected = generate(tiny.reference, prompt, 3 * NUM_TOKENS)
    assert torch.equal(torch.cat(texts, dim=1), expected)
    assert [failover.num_replayed_tokens for failover in failovers] == [0, 0]
