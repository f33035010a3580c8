"""The model without a head returns what transformers' own does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tuning_scene import REPLICAS, assert_close, make_batch, open_model

from shoal.client import AutoDistributedModel, RemoteSequential


@pytest.mark.parametrize("variant", ["llama", "bloom", "wrapped-opt", "wrapped-granite"])
def test_hidden_states_are_those_of_transformers(tiny_models: Any, variant: str) -> None:
    tiny, (ids, mask, _) = tiny_models.get(variant), make_batch()
    with open_model(tiny, REPLICAS, AutoDistributedModel) as model, torch.no_grad():
        found = model(ids, attention_mask=mask).last_hidden_state
        expected = tiny.decoder(ids, attention_mask=mask).last_hidden_state

        assert_close(found[mask == 1], expected[mask == 1])
        with model.h.inference_session(max_length=14):
            parts = [model(ids[:, :9])[0], model(ids[:, 9:])[0]]
        assert_close(torch.cat(parts, dim=1)[mask == 1], expected[mask == 1])


def test_parts_are_on_the_model_itself(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), kind=AutoDistributedModel) as model:
        ids = make_batch()[0]
        hidden = model.word_embeddings_layernorm(model.word_embeddings(ids))

        assert isinstance(model.h, RemoteSequential)
        assert_close(model.ln_f(model.h(hidden)), model(ids).last_hidden_state)
