"""What users of PETALS import and call is there, and does what it did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from tuning_scene import REPLICAS, assert_close, make_batch, open_model

from shoal.client import (
    AutoDistributedConfig,
    AutoDistributedModel,
    AutoDistributedSpeculativeModel,
    InferenceSession,
    RemoteSequenceManager,
    RemoteSequential,
    UsageError,
)
from shoal.peer.local_swarm.loopback import LoopbackSwarm


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def config(tiny_models: Any) -> Any:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, REPLICAS, weights="fp32")
    return AutoDistributedConfig.from_pretrained(directory, connect=swarm.connect, seed=3)


@pytest.fixture
def blocks(config: Any) -> Iterator[RemoteSequential]:
    with RemoteSequential(config, start_block=1, end_block=3) as blocks:
        yield blocks


def test_configuration_is_that_of_transformers_and_the_client(config: Any) -> None:
    assert (config.num_hidden_layers, config.hidden_size) == (4, 64)
    assert config.model_type == "llama"
    assert config.initial_peers == ()
    assert config.client.seed == 3
    assert len(config.dht_prefix) > 8
    with pytest.raises(AttributeError):
        _ = config.no_such_thing


def test_blocks_of_a_configuration_are_differentiable(blocks: Any, tiny_models: Any) -> None:
    with open_model(tiny_models.get()) as model:
        hidden, prompts = draw(2, 7, 64).requires_grad_(), draw(2, 2, 3, 64).requires_grad_()
        expected = torch.autograd.grad(
            model.transformer.h[1:3](hidden, prompts).sum(), (hidden, prompts)
        )
        found = torch.autograd.grad(blocks(hidden, prompts).sum(), (hidden, prompts))

    assert len(blocks) == 2
    for mine, their in zip(found, expected, strict=True):
        assert_close(mine, their)


def test_blocks_of_a_configuration_have_sessions(blocks: Any) -> None:
    hidden = draw(1, 6, 64)
    expected = blocks(hidden)

    with blocks.inference_session(max_length=6) as session:
        assert isinstance(session, InferenceSession)
        parts = [session.step(hidden[:, :4]), session.step(hidden[:, 4:5]), blocks(hidden[:, 5:])]
        assert session.position == blocks.position == 6
        with pytest.raises(ValueError, match="Maximum length exceeded"):
            session.step(hidden[:, :1])
        session.position = 4
        assert_close(session.step(hidden[:, 4:]), expected[:, 4:])

    assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (0, 5), (-1, 2)])
def test_blocks_that_the_model_does_not_have_are_refused(
    config: Any, start: int, stop: int
) -> None:
    with pytest.raises(UsageError, match="blocks 0:4"):
        RemoteSequential(config, start_block=start, end_block=stop)


@pytest.mark.parametrize(
    "open_blocks", [RemoteSequential, lambda config: RemoteSequenceManager(config, ["x.0"])]
)
def test_name_in_place_of_a_configuration_is_refused(open_blocks: Any) -> None:
    with pytest.raises(UsageError, match=r"AutoDistributedConfig\.from_pretrained.*, not 'x'"):
        open_blocks("x")


def test_small_model_guesses_and_the_text_stays_the_same(tiny_models: Any) -> None:
    ids, options = torch.tensor([[5, 9, 60]]), {"max_new_tokens": 12, "do_sample": False}
    tiny, small = tiny_models.get(), tiny_models.get("llama-tied").reference
    with open_model(tiny, REPLICAS, AutoDistributedSpeculativeModel, small_model=small) as model:
        found = model.generate(ids, **options)
        assert model.state_dict() == {}

    assert torch.equal(found, tiny.reference.generate(ids, **options))


@pytest.mark.parametrize("variant", ["llama", "bloom", "wrapped-opt"])
def test_hidden_states_of_a_model_without_a_head_are_those_of_transformers(
    tiny_models: Any, variant: str
) -> None:
    tiny, (ids, mask, _) = tiny_models.get(variant), make_batch()
    with open_model(tiny, REPLICAS, AutoDistributedModel) as model, torch.no_grad():
        found = model(ids, attention_mask=mask).last_hidden_state
        expected = tiny.decoder(ids, attention_mask=mask).last_hidden_state

        assert_close(found[mask == 1], expected[mask == 1])
        with model.h.inference_session(max_length=14):
            parts = [model(ids[:, :9])[0], model(ids[:, 9:])[0]]
        assert_close(torch.cat(parts, dim=1)[mask == 1], expected[mask == 1])


def test_model_without_a_head_has_its_parts_on_itself(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), kind=AutoDistributedModel) as model:
        ids = make_batch()[0]
        hidden = model.word_embeddings_layernorm(model.word_embeddings(ids))

        assert isinstance(model.h, RemoteSequential)
        assert_close(model.ln_f(model.h(hidden)), model(ids).last_hidden_state)
