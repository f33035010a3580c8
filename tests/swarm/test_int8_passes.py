"""Training with 8 bits for each number on the wire: half the bytes, the same loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from measuring.watched_transport import WatchedNetwork
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

NUM_UPDATES = 16
NUM_PROMPTS = 8


@pytest.mark.slow
def test_half_the_bytes_lead_to_the_same_loss(tiny_models: Any) -> None:
    loss_in_16_bits, num_bytes_in_16_bits = train(tiny_models, "bf16")
    loss_in_8_bits, num_bytes_in_8_bits = train(tiny_models, "int8")

    assert num_bytes_in_8_bits <= 0.55 * num_bytes_in_16_bits
    assert loss_in_8_bits == pytest.approx(loss_in_16_bits, rel=0.01)


def train(tiny_models: Any, wire_dtype: str) -> tuple[float, int]:
    """Train a soft prompt; return the last loss, and how many bytes travelled."""
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, ((0, 2), (2, 4)), weights="fp32")
    network = WatchedNetwork(swarm.connect())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (4, 24), generator=generator)
    prompt = 0.1 * torch.randn(1, NUM_PROMPTS, 64, generator=generator)
    prompt.requires_grad_()
    optimizer = torch.optim.Adam([prompt], lr=0.03)
    losses: list[float] = []
    settings: Any = {"connect": lambda config: network, "wire_dtype": wire_dtype}
    with AutoDistributedModelForCausalLM.from_pretrained(directory, **settings) as model:
        for _ in range(NUM_UPDATES):
            loss = compute_loss(model, prompt, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0], losses
    return losses[-1], network.transport.num_bytes


def compute_loss(model: DistributedCausalLM, prompt: Tensor, tokens: Tensor) -> Tensor:
    text = model.get_input_embeddings()(tokens)
    embeddings = torch.cat([prompt.expand(len(tokens), -1, -1), text], dim=1)
    logits = model(inputs_embeds=embeddings).logits[:, NUM_PROMPTS - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
