"""Texts become tokens, and are split, limited and put into batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from shoal.client.finetuning.dataset import (
    Dataset,
    ShuffledTexts,
    cut_into_batches,
    encode_text,
    make_batch,
    make_dataset,
)
from shoal.client.finetuning.text_files import TrainingText
from shoal.client.model.local_layers import IGNORED
from shoal.protocol.errors import UsageError

STORIES = Path(__file__).resolve().parents[3] / "models" / "shoal-stories"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STORIES)


class EndingTokenizer:
    """Puts the end behind every text, as some do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        found = self._tokenizer(text, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            found["input_ids"].append(self.eos_token_id)
        return found


def make_texts(count: int) -> list[TrainingText]:
    return [TrainingText(f"d.jsonl:{number}", f"Story {number}.") for number in range(count)]


def test_texts_end_as_the_model_ends_them(tokenizer: Any) -> None:
    dataset = make_dataset([TrainingText("d:1", "Once upon a time")], tokenizer, 64)

    (example,) = dataset.training
    assert list(example.token_ids) == [
        *tokenizer("Once upon a time").input_ids,
        tokenizer.eos_token_id,
    ]
    assert example.num_learned == len(example.token_ids) - 1


def test_only_completions_are_learned(tokenizer: Any) -> None:
    text = TrainingText("d:1", " lived a girl.", "There once")
    dataset = make_dataset([text], tokenizer, 64)

    batch = make_batch(dataset.training, dataset.padding_id)

    learned = batch.labels_BT[batch.labels_BT != IGNORED]
    assert tokenizer.decode(learned) == " lived a girl." + tokenizer.eos_token
    assert tokenizer.decode(batch.input_ids_BT[0]).endswith("There once lived a girl.</s>")
    assert batch.num_learned == len(learned)


TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}"
    "{% if turn.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = tuple(
    {"role": role, "content": content}
    for role, content in [
        ("user", "A cat?"), ("assistant", " It ran."), ("user", "And?"), ("assistant", " It sat.")
    ]
)  # fmt: skip


@pytest.fixture
def chatting(tokenizer: Any) -> Any:
    """The tokenizer with a template, as models for chats have one."""
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = TEMPLATE
    return copied


def test_turns_of_the_assistant_are_learned(chatting: Any) -> None:
    text = TrainingText("d:1", "", messages=CHAT)

    batch = make_batch([encode_text(text, chatting)], 0)

    ids, labels = batch.input_ids_BT[0], batch.labels_BT[0]
    whole = chatting.apply_chat_template(list(CHAT), tokenize=False)
    assert torch.equal(ids, torch.tensor(chatting(whole, add_special_tokens=False).input_ids))
    assert chatting.decode(ids[labels != IGNORED]) == " It ran.</s> It sat.</s>"
    assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])


def test_cut_chat_keeps_its_losses(chatting: Any) -> None:
    text = TrainingText("d:1", "", messages=CHAT)
    num_tokens = len(encode_text(text, chatting).token_ids)

    dataset = make_dataset([text], chatting, num_tokens - 3)

    assert dataset.num_cut == 1
    assert chatting.decode(
        make_batch(dataset.training, 0).labels_BT[make_batch(dataset.training, 0).labels_BT >= 0]
    ).startswith(" It ran.</s>")


def test_instructions_are_chats_where_there_is_a_template(tokenizer: Any, chatting: Any) -> None:
    text = TrainingText("d:1", "4", "Add.\n\n", messages=CHAT[:2])

    assert chatting.decode(encode_text(text, chatting).token_ids).endswith(" It ran.</s>")
    assert tokenizer.decode(encode_text(text, tokenizer).token_ids).endswith("4</s>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        ("{{ messages[-1].content }}", "writes turn 2 in another way once others follow"),
    ],
)
def test_chats_that_cannot_be_written_are_refused(
    chatting: Any, template: str | None, message: str
) -> None:
    chatting.chat_template = template

    with pytest.raises(UsageError, match=f"^d:1: .*{message}"):
        encode_text(TrainingText("d:1", "", messages=CHAT), chatting)


def test_prompts_keep_the_tokens_that_they_have_alone(tokenizer: Any) -> None:
    # "gir" + "l" would be one token, that no prompt can end with.
    text = TrainingText("d:1", "l was", "a gir")

    (example,) = make_dataset([text], tokenizer, 64).training

    prompt_ids = tokenizer("a gir").input_ids
    assert list(example.token_ids[: len(prompt_ids)]) == prompt_ids
    assert list(example.has_loss).index(1) == len(prompt_ids)
    assert tokenizer("a girl was").input_ids[: len(prompt_ids)] != prompt_ids


def test_end_that_a_tokenizer_puts_behind_every_text_stands_behind_the_whole(
    tokenizer: Any,
) -> None:
    text = TrainingText("d:1", "l was", "a gir")

    example = encode_text(text, EndingTokenizer(tokenizer))

    assert list(example.token_ids).count(tokenizer.eos_token_id) == 1
    assert example.token_ids[-1] == tokenizer.eos_token_id
    assert example == encode_text(text, tokenizer)


def test_texts_that_are_too_long_are_cut_and_counted(tokenizer: Any) -> None:
    texts = [
        TrainingText("d:1", "One two three four five six."),
        TrainingText("d:2", "b", "A prompt that is far too long to learn from."),
        TrainingText("d:3", "Short."),
    ]

    dataset = make_dataset(texts, tokenizer, 8)

    assert [len(example.token_ids) <= 8 for example in dataset.training] == [True, True]
    assert (dataset.num_cut, dataset.num_left_out) == (1, 1)


def test_of_long_prose_nothing_is_lost(tokenizer: Any) -> None:
    prose = TrainingText("d.txt:1", "One two three four five six seven eight.", is_prose=True)

    dataset = make_dataset([prose], tokenizer, 8)

    learned = [token_id for part in dataset.training for token_id in part.token_ids[1:]]
    assert learned == [*tokenizer(prose.completion).input_ids[1:], tokenizer.eos_token_id]
    assert len(dataset.training) > 1
    assert max(len(part.token_ids) for part in dataset.training) == 8
    assert (dataset.num_cut, dataset.num_left_out) == (0, 0)


def test_nothing_to_learn_is_an_error(tokenizer: Any) -> None:
    text = TrainingText("d:1", "b", "A prompt that is too long.")

    with pytest.raises(UsageError, match="no text \\(of 1\\) has a token to predict within 4"):
        make_dataset([text], tokenizer, 4)


def test_evaluation_is_a_part_that_follows_from_the_seed(tokenizer: Any) -> None:
    datasets = [make_dataset(make_texts(40), tokenizer, 64, 0.05, seed) for seed in (1, 1, 2)]

    sizes = {(len(dataset.training), len(dataset.evaluation)) for dataset in datasets}
    assert sizes == {(38, 2)}
    assert datasets[0].digest == datasets[1].digest
    assert datasets[0].digest != datasets[2].digest
    everything = {bytes(e.token_ids) for e in (*datasets[0].training, *datasets[0].evaluation)}
    assert len(everything) == 40


@pytest.mark.parametrize(
    ("count", "fraction", "sizes"), [(1, 0.5, (1, 0)), (2, 0.01, (1, 1)), (4, 0, (4, 0))]
)
def test_few_texts_are_split_with_something_left_to_learn(
    tokenizer: Any, count: int, fraction: float, sizes: tuple[int, int]
) -> None:
    dataset = make_dataset(make_texts(count), tokenizer, 64, fraction)

    assert (len(dataset.training), len(dataset.evaluation)) == sizes


def test_batches_pad_behind_shorter_texts(tokenizer: Any) -> None:
    texts = [TrainingText("d:1", "One two three."), TrainingText("d:2", "One.")]
    dataset = make_dataset(texts, tokenizer, 64)

    batch = make_batch(dataset.training, dataset.padding_id)

    short = len(dataset.training[1].token_ids)
    assert batch.attention_mask_BT[1].tolist()[short:] == [0] * (batch.labels_BT.shape[1] - short)
    assert (batch.labels_BT[1, short:] == IGNORED).all()
    assert batch.num_tokens == sum(len(example.token_ids) for example in dataset.training)
    assert batch.num_learned == batch.num_tokens - 2  # nothing precedes the first of each


def test_batches_in_order_hold_every_text_once(tokenizer: Any) -> None:
    dataset = make_dataset(make_texts(5), tokenizer, 64)

    batches = list(cut_into_batches(dataset.training, 2, dataset.padding_id))

    assert [len(batch.input_ids_BT) for batch in batches] == [2, 2, 1]
    assert isinstance(dataset, Dataset)
    assert torch.equal(batches[2].input_ids_BT[0], torch.tensor(dataset.training[4].token_ids))


def test_each_epoch_takes_every_text_once_in_another_order() -> None:
    texts = ShuffledTexts(7, seed=3)

    epochs = [texts.take(7 * epoch, 7) for epoch in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_goes_on_from_anywhere_and_over_the_end_of_an_epoch() -> None:
    whole = ShuffledTexts(5, seed=9).take(0, 20)

    later = ShuffledTexts(5, seed=9)

    assert [later.take(start, 4) for start in (0, 4, 8, 12, 16)] == [
        whole[start : start + 4] for start in (0, 4, 8, 12, 16)
    ]
    assert ShuffledTexts(5, seed=9).take(13, 2) == whole[13:15]
    assert ShuffledTexts(5, seed=8).take(0, 20) != whole
