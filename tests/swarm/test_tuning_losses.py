"""What prompts learn does not depend on how peers hold their weights."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "shoal-stories"
SPANS = ((0, 4), (4, 8))
NUM_STEPS, NUM_ROWS, NUM_TOKENS, NUM_PROMPTS = 12, 2, 24, 4
SEED = 11


def make_prompts(model: DistributedCausalLM) -> tuple[Tensor, Tensor]:
    """Return what is learned: shallow prompts, and deep ones for each block."""
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    shallow = torch.randn(1, NUM_PROMPTS, config.hidden_size, generator=generator)
    deep = torch.zeros(config.num_hidden_layers, 1, NUM_PROMPTS, config.hidden_size)
    return shallow.requires_grad_(), deep.requires_grad_()


def compute_loss(
    model: DistributedCausalLM, texts_BT: Tensor, shallow: Tensor, deep: Tensor
) -> Tensor:
    """Return how surprised the model is by texts behind the prompts."""
    embedded = model.transformer.word_embeddings(texts_BT).float()
    hidden = torch.cat([shallow.expand(len(texts_BT), -1, -1), embedded], dim=1)
    output = model.transformer.h(hidden, deep)
    logits = model.lm_head(model.transformer.ln_f(output[:, NUM_PROMPTS:-1]))
    return F.cross_entropy(logits.flatten(0, 1), texts_BT[:, 1:].flatten())


@functools.lru_cache
def learn(weights: str) -> list[float]:
    """Return the losses of texts that no model has seen: random tokens."""
    swarm = LoopbackSwarm(BUNDLED, SPANS, weights=weights)
    with AutoDistributedModelForCausalLM.from_pretrained(
        BUNDLED, connect=swarm.connect, torch_dtype="float32"
    ) as model:
        generator = torch.Generator().manual_seed(SEED)
        shape = (NUM_ROWS, NUM_TOKENS)
        texts_BT = torch.randint(model.config.vocab_size, shape, generator=generator)
        prompts = make_prompts(model)
        optimizer = torch.optim.Adam(prompts, lr=0.03)
        losses: list[float] = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = compute_loss(model, texts_BT, *prompts)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.slow
@pytest.mark.parametrize("weights", [pytest.param("bf16", marks=pytest.mark.thorough), "int8"])
def test_final_loss_is_within_two_percent_of_fp32(weights: str) -> None:
    exact, found = learn("fp32"), learn(weights)

    assert exact[-1] < 0.8 * exact[0]
    assert found[-1] == pytest.approx(exact[-1], rel=0.02)
