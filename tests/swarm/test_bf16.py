"""Peers that hold and compute in bfloat16: as near to float32 as transformers in bfloat16 is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

NUM_NEW_TOKENS = 12
PROMPT_TOKENS = 17


def root_mean_square(values: Tensor) -> float:
    return values.float().square().mean().sqrt().item()


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_swarm_in_bf16_errs_no_more_than_transformers_in_bf16(
    tiny_models: Any, variant: str
) -> None:
    tiny = tiny_models.get(variant)
    swarm = LoopbackSwarm(tiny.directory, [(0, 1), (1, 4)], "bf16")
    rounded = AutoModelForCausalLM.from_pretrained(
        tiny.directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(20240229)
    prompt = torch.randint(3, 128, (2, PROMPT_TOKENS), generator=generator)

    with AutoDistributedModelForCausalLM.from_pretrained(
        tiny.directory, connect=swarm.connect
    ) as model:
        told: Any = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    # The prompt at once, then token by token; the references see the same words in one piece.
    logits = torch.stack(told.logits, dim=1)
    with torch.no_grad():
        exact, theirs = (
            reference(told.sequences[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
            for reference in (tiny.reference, rounded)
        )
    our_error = root_mean_square(logits - exact)
    their_error = root_mean_square(theirs - exact)
    assert logits.shape == exact.shape
    # Measured 0.8 to 1.1 times theirs; peers in float32 would err ten times less.
    assert 0.3 * their_error < our_error < 1.5 * their_error, (our_error, their_error)
