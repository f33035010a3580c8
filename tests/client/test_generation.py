"""generate() over remote blocks gives the tokens of the plain transformers model."""

from typing import Any

import pytest
import torch
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
from transformers.generation.streamers import BaseStreamer

from shoal.client.generation import Settings, plan_generation
from shoal.protocol.errors import UsageError

SEED = 1234


def make_ids(num_rows: int, num_tokens: int, seed: int = SEED) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (num_rows, num_tokens), generator=generator)


class Recorder(BaseStreamer):
    """Keeps what it is given; interrupts after so many calls if told to."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.values: list[Tensor] = []
        self.is_ended = False
        self._interrupt_after = interrupt_after

    def put(self, value: Tensor) -> None:
        self.values.append(value)
        if len(self.values) == self._interrupt_after:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.is_ended = True


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
    ids=str,
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


def test_prompt_lookup_equals_transformers(pair: Any) -> None:
    ids = make_ids(1, 5).repeat(1, 3)

    expected = pair.reference.generate(ids, max_new_tokens=14)
    text = pair.model.generate(ids, max_new_tokens=14, prompt_lookup_num_tokens=3)

    assert torch.equal(text, expected)
    assert any(step.num_tokens > 1 for step in pair.client.sessions[-1].sent[1:])


def test_rows_that_end_early_are_padded_like_transformers(pair: Any) -> None:
    ids = make_ids(3, 6)
    free = pair.reference.generate(ids, max_new_tokens=12)
    eos = int(free[0, 9])

    options = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0}
    expected = pair.reference.generate(ids, **options)

    assert torch.equal(pair.model.generate(ids, **options), expected)
    assert (expected == 0).any()


def test_max_length_counts_the_prompt(pair: Any) -> None:
    ids = make_ids(1, 5)

    assert pair.model.generate(ids, max_length=9).shape == (1, 9)


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


def test_calls_in_one_session_continue_the_text_without_computing_it_again(pair: Any) -> None:
    ids = make_ids(3, 6)
    expected = pair.reference.generate(ids, max_new_tokens=10, repetition_penalty=1.2)

    recorder = Recorder()
    with pair.model.inference_session(max_length=16) as session:
        options = {"repetition_penalty": 1.2}
        parts = [
            pair.model.generate(ids, session=session, max_new_tokens=1, **options),
            pair.model.generate(None, max_new_tokens=8, streamer=recorder, **options),
            pair.model.generate(max_new_tokens=1, **options),
        ]

    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert [part.shape[1] for part in parts] == [7, 8, 1]
    assert sum(step.num_tokens for step in session.sent) == 15
    assert recorder.values[0].shape == (3, 0)
    assert session.closed


def test_new_input_is_appended_to_the_text_of_a_session(pair: Any) -> None:
    ids, more_ids = make_ids(1, 6), make_ids(1, 4, seed=5)
    first = pair.reference.generate(ids, max_new_tokens=3)
    expected = pair.reference.generate(torch.cat([first, more_ids], dim=1), max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(ids, max_new_tokens=3)
        text = pair.model.generate(more_ids, max_new_tokens=5)

    assert torch.equal(text, expected[:, first.shape[1] :])
    assert torch.equal(session.output_ids, expected)


def test_rollback_shortens_the_text_that_generate_remembers(pair: Any) -> None:
    ids, more_ids = make_ids(2, 6), make_ids(2, 3, seed=5)
    expected = pair.reference.generate(torch.cat([ids[:, :4], more_ids], dim=1), max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(ids, max_new_tokens=8)
        session.position = 4
        text = pair.model.generate(more_ids, max_new_tokens=5)

    assert torch.equal(torch.cat([ids[:, :4], text], dim=1), expected)


def test_rollback_into_the_generated_text_generates_it_again(pair: Any) -> None:
    ids = make_ids(1, 6)

    with pair.model.inference_session(max_length=30) as session:
        text = pair.model.generate(ids, max_new_tokens=8)
        session.position = 9
        again = pair.model.generate(None, max_new_tokens=5)

    assert torch.equal(again, text[:, 9:])


def test_beam_search_in_a_session_is_continued_by_another(pair: Any) -> None:
    ids = make_ids(2, 6)
    first = pair.reference.generate(ids, max_new_tokens=5, num_beams=3)
    expected = pair.reference.generate(first, max_new_tokens=4, num_beams=3)

    with pair.model.inference_session(max_length=30):
        parts = [
            pair.model.generate(ids, max_new_tokens=5, num_beams=3),
            pair.model.generate(None, max_new_tokens=4, num_beams=3),
        ]

    assert torch.equal(torch.cat(parts, dim=1), expected)


def test_text_of_other_rows_says_what_to_do(pair: Any) -> None:
    with pair.model.inference_session(max_length=30):
        pair.model.generate(make_ids(1, 6), max_new_tokens=3, num_beams=3)

        with pytest.raises(UsageError, match=r"new input 2; set session\.position = 0"):
            pair.model.generate(make_ids(2, 2), max_new_tokens=3)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_failed_call_leaves_the_session_as_it_was(pair: Any, num_beams: int) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] >= 12:
                raise ZeroDivisionError
            return scores

    ids, more_ids = make_ids(2, 6), make_ids(2, 2, seed=5)
    options = {"max_new_tokens": 3, "num_beams": num_beams}
    first = pair.reference.generate(ids, **options)
    expected = pair.reference.generate(first, **options)

    with pair.model.inference_session(max_length=40) as session:
        pair.model.generate(ids, **options)
        position = session.position
        with pytest.raises(ZeroDivisionError):
            pair.model.generate(
                more_ids,
                max_new_tokens=8,
                num_beams=num_beams,
                logits_processor=LogitsProcessorList([Broken()]),
            )
        assert session.position == position
        text = pair.model.generate(None, **options)

    assert torch.equal(text, expected[:, first.shape[1] :])


def test_interrupt_in_a_streamer_leaves_the_session_usable(pair: Any) -> None:
    ids = make_ids(1, 6)
    expected = pair.reference.generate(ids, max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        with pytest.raises(KeyboardInterrupt):
            pair.model.generate(ids, max_new_tokens=9, streamer=Recorder(interrupt_after=4))
        assert session.position == 0
        text = pair.model.generate(ids, max_new_tokens=5)

    assert torch.equal(text, expected)


def test_interrupt_closes_a_session_of_the_call_itself(pair: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        pair.model.generate(make_ids(1, 6), max_new_tokens=9, streamer=Recorder(interrupt_after=4))

    assert pair.client.sessions[-1].closed


def test_forward_in_a_session_is_part_of_its_text(pair: Any) -> None:
    ids = make_ids(2, 8)
    expected = pair.reference.generate(ids, max_new_tokens=5)

    with pair.model.inference_session(max_length=30):
        pair.model(ids[:, :3])
        pair.model(ids[:, 3:5])
        text = pair.model.generate(ids[:, 5:], max_new_tokens=5)

    assert torch.equal(text, expected[:, 5:])


def test_forward_may_send_the_last_token_of_a_text(pair: Any) -> None:
    ids = make_ids(1, 4)
    expected = pair.reference.generate(ids, max_new_tokens=9)

    with pair.model.inference_session(max_length=30) as session:
        text = pair.model.generate(ids, max_new_tokens=3)
        logits = pair.model(session.last_token_id).logits
        rest = pair.model.generate(logits.argmax(dim=-1), max_new_tokens=5)

    assert torch.equal(torch.cat([text, rest], dim=1), expected)


def test_text_is_unknown_after_forward_of_single_beams(pair: Any) -> None:
    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(make_ids(1, 6), max_new_tokens=3, num_beams=3)
        pair.model(make_ids(3, 2))

        assert session.output_ids is None
        with pytest.raises(UsageError, match="output_ids"):
            pair.model.generate(None, max_new_tokens=3, num_beams=3)


def test_text_of_manual_steps_must_be_told(pair: Any) -> None:
    ids = make_ids(1, 8)
    hidden = pair.model.transformer.word_embeddings(ids[:, :5])

    with pair.model.inference_session(max_length=30) as session:
        session.step(hidden)
        with pytest.raises(UsageError, match="output_ids"):
            pair.model.generate(ids[:, 5:], max_new_tokens=3)
        session.output_ids = ids[:, :5]
        text = pair.model.generate(ids[:, 5:], max_new_tokens=3)

    assert torch.equal(text, pair.reference.generate(ids, max_new_tokens=3)[:, 5:])


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (None, {}, "empty"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "empty"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, "shape"),
        (torch.tensor([5, 6]), {}, "shape"),
        (torch.tensor([[5.0, 6.0]]), {}, "whole numbers"),
        (torch.tensor([[True, False]]), {}, "whole numbers"),
        ([[5, 6]], {}, "return_tensors"),
        (torch.tensor([[5, 128]]), {}, "from 0 to 127, got 5 to 128"),
        (torch.tensor([[-1, 5]]), {}, "from 0 to 127"),
        (torch.tensor([[5, 6]]), {"input_ids": torch.tensor([[5]])}, "either"),
        (torch.tensor([[5, 6]]), {"attention_mask": torch.tensor([[0, 1]])}, "grouped by length"),
        (torch.tensor([[5, 6]]), {"attention_mask": torch.ones(2, 2)}, "shape"),
        (torch.tensor([[5, 6]]), {"attention_mask": torch.ones(1, 3)}, "shape"),
        (torch.tensor([[5, 6]]), {"attention_mask": [[1, 1]]}, "tensor"),
        (torch.tensor([[0, 6]]), {"pad_token_id": 0, "eos_token_id": 2}, "padding token 0"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": 511}, "make 513, the model has 512"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": 0}, "at least 1"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": 2.5}, "whole number"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": None, "max_length": 2}, "max_length is 2"),
        (torch.tensor([[5, 6]]), {"num_beams": 257}, "257 rows"),
        (torch.tensor([[5, 6]]), {"use_cache": False}, "use_cache"),
        (torch.tensor([[5, 6]]), {"cache_implementation": "static"}, "cache_implementation"),
        (torch.tensor([[5, 6]]), {"guidance_scale": 2.0}, "guidance"),
        (torch.tensor([[5, 6]]), {"inputs_embeds": torch.zeros(1, 2, 64)}, "inputs_embeds"),
        (torch.tensor([[5, 6]]), {"output_attentions": True}, "output_attentions"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_call_is_refused_before_anything_is_sent(
    pair: Any, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pair.model.generate(inputs, **{"max_new_tokens": 3, **options})

    assert pair.client.sessions == []


def test_padding_token_is_accepted_when_the_mask_says_it_is_meant(pair: Any) -> None:
    ids = torch.tensor([[0, 6, 7]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 3}

    text = pair.model.generate(ids, **options)

    assert torch.equal(text, pair.reference.generate(ids, **options))


def test_session_that_is_too_short_is_refused_before_anything_is_sent(pair: Any) -> None:
    with pair.model.inference_session(max_length=8) as session:
        with pytest.raises(UsageError, match="grow to 10 tokens and the session holds 8"):
            pair.model.generate(make_ids(1, 6), max_new_tokens=4)
        assert session.sent == []
        # The last token of a text is never sent.
        assert pair.model.generate(make_ids(1, 6), max_new_tokens=3).shape == (1, 9)


def test_closed_session_is_refused(pair: Any) -> None:
    with pair.model.inference_session(max_length=8) as session:
        pass

    with pytest.raises(UsageError, match="closed"):
        pair.model.generate(make_ids(1, 2), session=session, max_new_tokens=2)


def test_default_length_is_that_of_transformers(pair: Any) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens"):
        text = pair.model.generate(make_ids(1, 3))

    assert text.shape == (1, 23)


def test_settings_prefer_arguments_over_configurations() -> None:
    own, models = GenerationConfig(num_beams=2), GenerationConfig(num_beams=3, max_new_tokens=7)

    settings = Settings({"num_beams": 4}, own, models)

    assert settings.get_count("num_beams") == 4
    assert settings.get_count("max_new_tokens") == 7
    assert Settings({}, own, models).get_count("num_beams") == 2


def test_plan_counts_rows_and_remembered_tokens() -> None:
    config = LlamaConfig(vocab_size=128, max_position_embeddings=64)

    plan = plan_generation(make_ids(2, 3), None, make_ids(2, 5), Settings({"num_beams": 3}), config)

    assert plan.input_ids_BT.shape == (2, 8)
    assert (plan.num_remembered, plan.num_rows, plan.max_length) == (5, 6, 28)
