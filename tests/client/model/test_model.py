"""The distributed model as an object: forward, remote blocks, sessions, opening."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_scene import make_ids
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from shoal.client.model.auto import AutoDistributedModelForCausalLM
from shoal.client.model.causal_lm import DistributedCausalLM
from shoal.client.model.remote_cache import RemoteCache
from shoal.client.settings.client_config import ClientConfig
from shoal.models.shells.step_cache import CACHE_NAME
from shoal.protocol.errors import ModelError, UsageError
from shoal.protocol.ids import ModelId
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_stateless_forward_equals_transformers(any_pair: Any, num_tokens: int) -> None:
    ids = make_ids(3, num_tokens)

    output = any_pair.model(ids, attention_mask=torch.ones_like(ids))

    assert_near(output.logits, any_pair.reference(ids).logits)
    assert output.logits.dtype == torch.float32
    assert not output.logits.requires_grad
    assert getattr(output, CACHE_NAME) is None
    assert any_pair.client.sessions == []
    assert any_pair.client.passes.spans == [Span(0, 4)]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_forward_in_a_session_continues_it(pair: Any, name: str) -> None:
    ids = make_ids(2, 9)
    expected = pair.reference(ids).logits

    with pair.model.inference_session(max_length=9) as session:
        first = pair.model(ids[:, :6])
        second = pair.model(ids[:, 6:8], **{name: getattr(first, CACHE_NAME)})
        third = pair.model(ids[:, 8:])

    logits = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert_near(logits, expected)
    assert [step.num_tokens for step in session.sent] == [6, 2, 1]


def test_forward_of_a_16_bit_model_does_not_round_what_blocks_return(bf16_pair: Any) -> None:
    ids = make_ids(2, 5)

    logits = bf16_pair.model(ids).logits

    assert bf16_pair.client.passes.dtypes == [torch.float32]
    assert logits.dtype == torch.float32
    # Rounding embedding, norm and head to 8 bits of mantissa leaves about this much.
    torch.testing.assert_close(logits, bf16_pair.reference(ids).logits, atol=0.15, rtol=0)


def test_forward_keeps_the_logits_that_are_asked_for(pair: Any) -> None:
    ids = make_ids(2, 6)
    expected = pair.reference(ids).logits

    assert_near(pair.model(ids, logits_to_keep=1).logits, expected[:, -1:])
    assert_near(pair.model(ids, logits_to_keep=2).logits, expected[:, -2:])
    assert_near(pair.model(ids, logits_to_keep=torch.tensor([0, 3])).logits, expected[:, [0, 3]])
    assert_near(pair.model(ids, return_dict=False)[0], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either"),
        ({"input_ids": torch.tensor([[5]]), "inputs_embeds": torch.zeros(1, 1, 64)}, "either"),
        ({"input_ids": torch.tensor([[500]])}, "from 0 to 127"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "empty"),
        ({"inputs_embeds": torch.zeros(1, 2, 65)}, "64"),
        ({"inputs_embeds": torch.zeros(1, 2, 64, dtype=torch.int64)}, "floating point"),
        (
            {"input_ids": torch.full((1, 513), 5)},
            "513 tokens are too many: the model has 512",
        ),
        (
            {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 1]])},
            "pad on the right",
        ),
        (
            {"input_ids": torch.tensor([[5]]), "past_key_values": DynamicCache()},
            "DynamicCache",
        ),
        (
            {"input_ids": torch.tensor([[5]]), "past_key_values": 1, "cache": 1},
            "two names of one argument",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_forward_refuses_wrong_inputs_before_anything_is_sent(
    pair: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pair.model(**arguments)

    assert pair.client.sessions == []


def test_model_has_the_names_of_petals(pair: Any) -> None:
    transformer, reference = pair.model.transformer, pair.reference

    assert torch.equal(transformer.word_embeddings.weight, reference.model.embed_tokens.weight)
    assert torch.equal(transformer.ln_f.weight, reference.model.norm.weight)
    assert torch.equal(pair.model.lm_head.weight, reference.lm_head.weight)
    assert len(transformer.h) == 4
    hidden = torch.ones(1, 1, 64)
    assert transformer.word_embeddings_layernorm(hidden) is hidden
    assert pair.model.config.hidden_size == 64


def test_model_holds_no_block_and_nothing_to_train(pair: Any) -> None:
    names = {name for name, _ in pair.model.named_parameters()}

    assert names == {
        "transformer.word_embeddings.weight",
        "transformer.ln_f.weight",
        "lm_head.weight",
    }
    assert not any(parameter.requires_grad for parameter in pair.model.parameters())


def test_model_cannot_be_saved(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other machines"):
        pair.model.save_pretrained(tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_closing_the_model_closes_its_client(pair: Any) -> None:
    with pair.model as model:
        assert model is pair.model

    assert pair.client.is_closed


def test_blocks_are_sliced_like_a_list(pair: Any) -> None:
    blocks = pair.model.transformer.h

    assert blocks[1].span == Span(1, 2)
    assert blocks[-1].span == Span(3, 4)
    assert blocks[1:3].span == Span(1, 3)
    assert blocks[1:3][1].span == Span(2, 3)
    assert blocks[2:].span == Span(2, 4)
    assert [block.span for block in blocks[1:3]] == [Span(1, 2), Span(2, 3)]
    with pytest.raises(IndexError):
        blocks[4]
    for uneven in (slice(2, 2), slice(0, 4, 2), slice(None, None, -1)):
        with pytest.raises(UsageError, match="consecutive"):
            blocks[uneven]


def test_blocks_one_by_one_equal_all_at_once(pair: Any) -> None:
    hidden = pair.model.transformer.word_embeddings(make_ids(2, 7))
    blocks = pair.model.transformer.h

    expected = blocks(hidden)
    output = hidden
    for block in blocks:
        output = block(output)

    assert_near(output, expected)
    spans = [Span(0, 4), Span(0, 1), Span(1, 2), Span(2, 3), Span(3, 4)]
    assert pair.client.passes.spans == spans


def test_blocks_continue_the_active_session_only(pair: Any) -> None:
    hidden = pair.model.transformer.word_embeddings(make_ids(1, 7))
    blocks = pair.model.transformer.h
    expected = blocks(hidden)

    with blocks.inference_session(max_length=7) as session:
        assert blocks.active_session is session
        first = blocks(hidden[:, :5])
        assert blocks.position == 5
        with blocks.use_session(None):
            assert_near(blocks(hidden[:, :2]), expected[:, :2])
        assert blocks[0:2].active_session is None
        second = blocks(hidden[:, 5:])

    assert_near(torch.cat([first, second], dim=1), expected)
    assert blocks.active_session is None
    assert blocks.position == 0


def test_blocks_return_an_empty_input_as_it_is(pair: Any) -> None:
    assert pair.model.transformer.h(torch.zeros(2, 0, 64)).shape == (2, 0, 64)
    assert pair.client.sessions == []


def test_remote_cache_composes_row_maps_until_the_next_step(pair: Any) -> None:
    hidden = pair.model.transformer.word_embeddings(make_ids(3, 4))
    session = pair.model.transformer.h.open_session(8)
    twin = pair.model.transformer.h.open_session(8)
    cache = RemoteCache(session)

    cache.step(hidden[:, :3], last_token_only=False)
    cache.reorder_cache(torch.tensor([1, 2, 0], dtype=torch.int32))
    cache.reorder_cache(torch.tensor([2, 2, 1], dtype=torch.int32))
    output = cache.step(hidden[:, 3:], last_token_only=True)

    rows = [0, 0, 2]
    twin.step(hidden[rows, :3])
    assert_near(output, twin.step(hidden[:, 3:]))
    assert cache.get_seq_length() == session.position == 4
    assert cache.get_max_length() == 8


def test_remote_cache_sends_no_row_map_that_moves_nothing(pair: Any) -> None:
    hidden = pair.model.transformer.word_embeddings(make_ids(3, 2))
    cache = RemoteCache(pair.model.transformer.h.open_session(8))

    cache.step(hidden[:, :1], last_token_only=False)
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.step(hidden[:, 1:], last_token_only=False)

    assert not any(step.has_row_map for step in pair.client.sessions[-1].sent)


def test_remote_cache_rolls_back_when_it_is_cropped(pair: Any) -> None:
    hidden = pair.model.transformer.word_embeddings(make_ids(1, 6))
    cache = RemoteCache(pair.model.transformer.h.open_session(8))
    cache.step(hidden, last_token_only=False)

    cache.crop(0)
    assert cache.get_seq_length() == 6
    cache.crop(-2)
    assert cache.get_seq_length() == 4
    cache.crop(3)
    assert cache.get_seq_length() == 3
    cache.reset()
    assert cache.get_seq_length() == 0
    for call in (cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(UsageError, match="open a new session"):
            call(2)  # pyright: ignore[reportArgumentType]


class NoSwarm:
    """Joins no swarm; keeps what it would have joined with."""

    def __init__(self) -> None:
        self.joined: list[tuple[int, ClientConfig]] = []

    def join(self, model_id: ModelId, model_config: Any, config: ClientConfig) -> Any:
        self.joined.append((model_config.num_hidden_layers, config))
        view = SwarmView(model_id, model_config.num_hidden_layers, 0.0, ())
        return SimpleNamespace(
            config=config, swarm=SimpleNamespace(book=SimpleNamespace(view=view))
        )


def test_from_pretrained_forwards_client_settings(tiny_models: Any) -> None:
    swarm = NoSwarm()

    model = DistributedCausalLM.from_pretrained(
        tiny_models.get("llama").directory,
        join_swarm=swarm.join,
        initial_peers=["/ip4/127.0.0.1/tcp/1/p2p/x"],
        torch_dtype="bfloat16",
        seed=7,
    )

    config = ClientConfig(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), seed=7)
    assert swarm.joined == [(4, config)]
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    assert model.transformer.h.span == Span(0, 4)


def test_from_pretrained_leaves_the_swarm_when_the_model_cannot_be_built(tiny_models: Any) -> None:
    class Unbuildable(DistributedCausalLM):
        def __init__(self, *arguments: Any) -> None:
            raise MemoryError

    swarm, closed = NoSwarm(), []

    def join(*arguments: Any) -> Any:
        client = swarm.join(*arguments)
        client.close = lambda: closed.append(client)
        return client

    with pytest.raises(MemoryError):
        Unbuildable.from_pretrained(tiny_models.get("llama").directory, join_swarm=join)
    assert len(closed) == 1


def test_from_pretrained_reads_the_defaults_of_generation(tiny_models: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_models.get("llama").directory, tmp_path / "model")
    GenerationConfig(eos_token_id=[5, 6], use_cache=False).save_pretrained(tmp_path / "model")

    model = DistributedCausalLM.from_pretrained(tmp_path / "model", join_swarm=NoSwarm().join)

    assert model.generation_config.eos_token_id == [5, 6]
    assert model.generation_config.use_cache is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_peer": ["x"]}, "does not know initial_peer; client settings are .*seed"),
        ({"torch_dtype": "int4"}, "torch_dtype"),
        ({"dtype": torch.int8}, "torch_dtype"),
        ({"join": "shoal:x"}, "join code"),
    ],
)
def test_from_pretrained_refuses_unknown_settings(
    tiny_models: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny_models.get("llama").directory, **options
        )


def test_from_pretrained_names_what_is_wrong_with_a_model(tiny_models: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models.get("llama").directory, model)

    with pytest.raises(ModelError, match="no model directory"):
        AutoDistributedModelForCausalLM.from_pretrained(tmp_path / "nowhere")
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        AutoDistributedModelForCausalLM.from_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ModelError, match="'mamba' are not supported"):
        AutoDistributedModelForCausalLM.from_pretrained(model)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_copy_is_refused_in_one_sentence(pair: Any) -> None:
    with pytest.raises(UsageError, match=r"open another one with from_pretrained"):
        copy.deepcopy(pair.model)
