"""generate() over remote blocks gives the tokens of the plain transformers model."""

from typing import Any

import numpy
import pytest
import torch
from generation_scene import SEED, Recorder, make_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shoal.client.model.generation import Settings, plan_generation
from shoal.protocol.errors import UsageError


class OnlyEven(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


class StopAtLength(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 10)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_greedy_text_equals_transformers(pair: Any, num_rows: int, num_tokens: int) -> None:
    ids = make_ids(num_rows, num_tokens)

    expected = pair.reference.generate(ids, max_new_tokens=12)
    text = pair.model.generate(ids, max_new_tokens=12)

    assert torch.equal(text, expected)
    assert pair.client.sessions[-1].closed


@pytest.mark.slow
def test_greedy_text_equals_transformers_for_every_kind_of_client(any_pair: Any) -> None:
    ids = make_ids(2, 17)

    expected = any_pair.reference.generate(ids, max_new_tokens=16)

    assert torch.equal(any_pair.model.generate(ids, max_new_tokens=16), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"num_beams": 2, "do_sample": True},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"logits_processor": LogitsProcessorList([OnlyEven()])},
        {"stopping_criteria": StoppingCriteriaList([StopAtLength()])},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_text_with_options_equals_transformers(
    pair: Any, num_rows: int, options: dict[str, Any]
) -> None:
    ids = make_ids(num_rows, 7)

    torch.manual_seed(SEED)
    expected = pair.reference.generate(ids, max_new_tokens=10, **options)
    torch.manual_seed(SEED)
    text = pair.model.generate(ids, max_new_tokens=10, **options)

    assert torch.equal(text, expected)


def test_stop_strings_equal_transformers(pair: Any) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    ids = make_ids(1, 5)
    free = pair.reference.generate(ids, max_new_tokens=12)
    stop = next(letters[index] for index in free[0, 7:] if letters[index].isascii())
    options = {"stop_strings": [stop], "tokenizer": tokenizer}

    expected = pair.reference.generate(ids, max_new_tokens=12, **options)
    text = pair.model.generate(ids, max_new_tokens=12, **options)

    assert torch.equal(text, expected)
    assert text.shape[1] < free.shape[1]


@pytest.mark.slow
def test_rows_that_end_early_are_padded_like_transformers(pair: Any) -> None:
    ids = make_ids(3, 6)
    free = pair.reference.generate(ids, max_new_tokens=12)
    eos = int(free[0, 9])

    options = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0}
    expected = pair.reference.generate(ids, **options)

    assert torch.equal(pair.model.generate(ids, **options), expected)
    assert (expected == 0).any()


def test_configuration_object_and_keyword_input_are_understood(pair: Any) -> None:
    ids = make_ids(2, 5)
    settings = GenerationConfig(max_new_tokens=4, return_dict_in_generate=True, output_logits=True)

    expected = pair.reference.generate(ids, generation_config=settings)
    mask = torch.ones_like(ids)
    output = pair.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)

    assert torch.equal(output.sequences, expected.sequences)
    for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)


def test_prefill_asks_for_the_last_token_only_and_marks_decoded_steps(pair: Any) -> None:
    pair.model.generate(make_ids(2, 9), max_new_tokens=3)

    sent = pair.client.sessions[-1].sent
    assert [(step.position, step.num_tokens) for step in sent] == [(0, 9), (9, 1), (10, 1)]
    assert [step.is_decoded for step in sent] == [False, True, True]
    assert all(step.last_token_only for step in sent)


def test_streamer_sees_the_prompt_and_every_token(pair: Any) -> None:
    ids = make_ids(1, 5)
    recorder = Recorder()

    text = pair.model.generate(ids, max_new_tokens=4, streamer=recorder)

    assert torch.equal(recorder.values[0], ids)
    assert torch.cat(recorder.values[1:]).tolist() == text[0, 5:].tolist()
    assert recorder.is_ended


def test_default_length_is_that_of_transformers(pair: Any) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens"):
        text = pair.model.generate(make_ids(1, 3))

    assert text.shape == (1, 23)


@pytest.mark.parametrize("number", [numpy.int64(4), torch.tensor(4)], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
def test_counts_may_be_of_any_library(pair: Any, name: str, number: Any) -> None:
    ids = make_ids(1, 3)

    text = pair.model.generate(ids, **{name: number})

    assert torch.equal(text, pair.reference.generate(ids, **{name: 4}))


def test_settings_prefer_arguments_over_configurations() -> None:
    own, models = GenerationConfig(num_beams=2), GenerationConfig(num_beams=3, max_new_tokens=7)

    settings = Settings({"num_beams": 4}, own, models)

    assert settings.get_count("num_beams") == 4
    assert settings.get_count("max_new_tokens") == 7
    assert Settings({}, own, models).get_count("num_beams") == 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_text_that_outgrows_an_exact_rotation_says_so(kind: str) -> None:
    config = LlamaConfig(vocab_size=128, max_position_embeddings=32)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 8.0}

    with pytest.raises(UsageError, match=f"32 positions here: beyond them its {kind} rope"):
        plan_generation(make_ids(1, 30), None, None, Settings({"max_new_tokens": 3}), config)
