"""Every family, through whole swarms in this process: what transformers says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

ONE_HOP = [(0, 4)]
THREE_HOPS = [(0, 1), (1, 3), (3, 4)]
FOUR_HOPS = [(0, 1), (1, 2), (2, 3), (3, 4)]
SHAPES = [(1, 1), (3, 2), (3, 17), (1, 300)]
NUM_NEW_TOKENS = 6
SETTINGS = {
    "do_sample": False,
    "max_new_tokens": NUM_NEW_TOKENS,
    "min_new_tokens": NUM_NEW_TOKENS,
    "pad_token_id": 0,
}
TOLERANCE = 1e-4
"""Float32 sums in another order; logits are of the order of one."""


def make_ids(num_rows: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * num_rows + num_tokens)
    return torch.randint(3, 128, (num_rows, num_tokens), generator=generator)


@pytest.mark.parametrize(
    ("spans", "shapes"),
    [
        pytest.param(ONE_HOP, SHAPES, marks=pytest.mark.thorough),
        (THREE_HOPS, SHAPES[2:3]),
        pytest.param(FOUR_HOPS, [*SHAPES[:2], *SHAPES[3:]], marks=pytest.mark.thorough),
    ],
    ids=["one hop", "three hops", "four hops, other shapes"],
)
def test_swarm_equals_transformers(
    tiny_family: Any, spans: list[tuple[int, int]], shapes: list[tuple[int, int]]
) -> None:
    directory, reference = tiny_family.directory, tiny_family.reference
    swarm = LoopbackSwarm(directory, spans)

    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model:
        for num_rows, num_tokens in shapes:
            ids = make_ids(num_rows, num_tokens)
            with torch.no_grad():
                expected = reference(ids).logits
            mask = torch.ones_like(ids)

            logits = model(ids).logits
            text: Any = model.generate(ids, **SETTINGS)

            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() < TOLERANCE, (num_rows, num_tokens)
            assert torch.equal(text, reference.generate(ids, attention_mask=mask, **SETTINGS)), (
                num_rows,
                num_tokens,
            )
            assert text.shape == (num_rows, num_tokens + NUM_NEW_TOKENS)
