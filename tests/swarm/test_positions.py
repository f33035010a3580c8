"""Positions that a decoder of transformers adds before its first block, which the client adds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from tuning_scene import FOUR_HOPS, assert_close, open_model

SETTINGS = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


def make_ids(num_rows: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, 128, (num_rows, num_tokens), generator=generator)


@pytest.mark.parametrize(
    "variant", ["wrapped-opt", pytest.param("wrapped-xglm", marks=pytest.mark.thorough)]
)
def test_positions_follow_the_session(tiny_models: Any, variant: str) -> None:
    tiny, ids = tiny_models.get(variant), make_ids(2, 80)
    with open_model(tiny, FOUR_HOPS) as model, torch.no_grad():
        expected = tiny.reference(ids).logits
        with model.inference_session(max_length=90) as session:
            pieces = [model(part).logits for part in ids.split([40, 1, 1, 33, 5], dim=1)]
            assert_close(torch.cat(pieces, dim=1), expected)

            session.position = 37
            assert_close(model(ids[:, 37:70]).logits, expected[:, 37:70])
        embedded = model.get_input_embeddings()(ids)
        assert_close(model(inputs_embeds=embedded).logits, expected)

        text: Any = model.generate(ids[:, :9], num_beams=3, **SETTINGS)
        mask = torch.ones(2, 9, dtype=torch.long)
        beams = tiny.reference.generate(ids[:, :9], attention_mask=mask, num_beams=3, **SETTINGS)
        assert torch.equal(text, beams)
