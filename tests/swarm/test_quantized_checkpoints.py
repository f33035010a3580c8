"""Checkpoints that come quantized, through a whole swarm: embedding and head at the client, too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import Awq, Compressed, Gptq, Scheme, save_quantized
from transformers import AutoModelForCausalLM

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

SETTINGS = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [("llama", Gptq(desc_act=True)), ("llama-tied", Awq()), ("qwen2", Compressed())],
    ids=["gptq", "awq", "compressed-tensors"],
)
def test_swarm_equals_transformers_with_the_weights_they_stand_for(
    tiny_models: Any, tmp_path: Path, variant: str, scheme: Scheme
) -> None:
    quantized = save_quantized(tiny_models.get(variant).directory, tmp_path, scheme)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        quantized.dense_directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    swarm = LoopbackSwarm(quantized.directory, [(0, 1), (1, 4)])
    ids = torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = reference(ids).logits

    with AutoDistributedModelForCausalLM.from_pretrained(
        quantized.directory, connect=swarm.connect
    ) as model:
        logits = model(ids).logits
        text: Any = model.generate(ids, attention_mask=mask, **SETTINGS)

    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(text, reference.generate(ids, attention_mask=mask, **SETTINGS))
