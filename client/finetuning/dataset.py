"""Texts as tokens, those that are learned and those that evaluate, and their batches.

Batches are a pure function of a seed: a run that is resumed takes the same ones. Tensor suffixes:
B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from ...protocol.errors import UsageError
from ..model.local_layers import IGNORED
from .text_files import TrainingText


@dataclass(frozen=True)
class Example:
    """The tokens of one text, and for each 1 if it has a loss or 0, as those of a prompt."""

    token_ids: array[int]
    has_loss: array[int]

    @property
    def num_learned(self) -> int:
        """Number of tokens with a loss; never the first, which no token precedes."""
        return sum(self.has_loss[1:])


@dataclass(frozen=True)
class Dataset:
    """All texts of a run."""

    training: Sequence[Example]
    evaluation: Sequence[Example]
    padding_id: int
    """The padding of texts that are shorter than others of their batch."""
    num_cut: int = 0
    """Texts whose end is left out, for they are too long."""
    num_left_out: int = 0
    """Texts that teach nothing: their prompt alone is too long, or they are one token."""

    @property
    def digest(self) -> str:
        """The digest of these texts in this order."""
        digest = hashlib.sha256()
        for example in (*self.training, *self.evaluation):
            digest.update(f"{len(example.token_ids)} ".encode())
            digest.update(example.token_ids.tobytes() + example.has_loss.tobytes())
        return digest.hexdigest()


def make_dataset(
    texts: Iterable[TrainingText],
    tokenizer: Any,
    max_length: int,
    eval_fraction: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Tokenize texts, `max_length` tokens at most, and hold out some by a seed for evaluation.

    Raises UsageError when nothing is left to learn.
    """
    examples: list[Example] = []
    num_cut = num_left_out = 0
    for text in texts:
        example = encode_text(text, tokenizer)
        parts = _cut_into_parts(example, max_length)
        learned = [part for part in parts if part.num_learned > 0]
        if not text.is_prose:
            learned = learned[:1] if parts[0].num_learned > 0 else []
            num_cut += bool(learned) and len(parts) > 1
        num_left_out += not learned
        examples += learned
    if not examples:
        raise UsageError(
            f"no text (of {num_left_out}) has a token to predict within {max_length} tokens; "
            "take longer texts, or a larger --max-length"
        )
    training, evaluation = _split(examples, eval_fraction, seed)
    padding_id = tokenizer.pad_token_id
    if padding_id is None:
        padding_id = tokenizer.eos_token_id or 0  # any will do: nobody looks at it
    return Dataset(training, evaluation, padding_id, num_cut, num_left_out)


def encode_text(text: TrainingText, tokenizer: Any) -> Example:
    """Return the tokens of a text, with the end of a text behind it where the model knows one.

    A chat ends as its template says. Raises UsageError for one that the tokenizer cannot write.
    """
    if text.messages and (tokenizer.chat_template is not None or not text.completion):
        return encode_chat(text, tokenizer)
    end = tokenizer.eos_token_id
    prompt_ids: list[int] = tokenizer(text.prompt).input_ids if text.prompt else []
    if end is not None and prompt_ids[-1:] == [end]:
        prompt_ids = prompt_ids[:-1]  # some tokenizers end every text, and this one goes on
    ids: list[int] = tokenizer(text.prompt + text.completion).input_ids
    if prompt_ids and ids[: len(prompt_ids)] != prompt_ids:
        # If a word spans the border, the prompt keeps the tokens that it has alone:
        # with those the model will be asked.
        ids = prompt_ids + tokenizer(text.completion, add_special_tokens=False).input_ids
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    num_prompt = len(prompt_ids)
    return Example(array("i", ids), array("b", [0] * num_prompt + [1] * (len(ids) - num_prompt)))


def encode_chat(text: TrainingText, tokenizer: Any) -> Example:
    """Return a chat in the words of the tokenizer's template, with a loss on assistant turns."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{text.place}: the tokenizer of this model has no chat template for `messages`; write "
            "`prompt` and `completion`"
        )
    if not tokenizer.is_fast:
        raise UsageError(f"{text.place}: `messages` need a fast tokenizer, which this model lacks")

    def write(num_turns: int, is_asked: bool = False) -> str:
        turns = [dict(turn) for turn in text.messages[:num_turns]]
        try:
            return tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=is_asked
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{text.place}: the model's chat template refuses these messages: {error!s:.120}"
            ) from error

    whole, spans = write(len(text.messages)), list[tuple[int, int]]()
    for number, turn in enumerate(text.messages):
        if turn["role"] == "assistant":
            before, through = write(number, is_asked=True), write(number + 1)
            if not (through.startswith(before) and whole.startswith(through)):
                raise UsageError(
                    f"{text.place}: the model's chat template writes turn {number + 1} in another "
                    "way once others follow; end the messages with it"
                )
            spans.append((len(before), len(through)))
    # The template has written what stands before and behind a text.
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    has_loss = [
        any(start <= first < stop for start, stop in spans) for first, _ in encoded.offset_mapping
    ]
    return Example(array("i", encoded.input_ids), array("b", has_loss))


def _cut_into_parts(example: Example, max_length: int) -> list[Example]:
    """Return parts that overlap by a token: every token but the first is predicted in one."""
    ids, stride = example.token_ids, max(1, max_length - 1)
    return [
        Example(ids[start : start + max_length], example.has_loss[start : start + max_length])
        for start in range(0, max(1, len(ids) - 1), stride)
    ]


def _split(
    examples: list[Example], eval_fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Return what is learned and what evaluates: at least one text each, if there are two."""
    wanted = max(1, round(len(examples) * eval_fraction)) if eval_fraction else 0
    num_chosen = min(wanted, len(examples) - 1)
    chosen = set(random.Random(seed).sample(range(len(examples)), num_chosen))
    training = [example for index, example in enumerate(examples) if index not in chosen]
    return training, [examples[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class Batch:
    """Texts beside each other; shorter ones have padding behind them."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    labels_BT: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens that are read, without padding."""
        return int(self.attention_mask_BT.sum())

    @property
    def num_learned(self) -> int:
        """Tokens that the loss is the mean over."""
        return int((self.labels_BT[:, 1:] != IGNORED).sum())


def make_batch(examples: Sequence[Example], padding_id: int) -> Batch:
    """Return texts as one batch, as wide as the longest."""
    shape = len(examples), max(len(example.token_ids) for example in examples)
    input_ids_BT = torch.full(shape, padding_id, dtype=torch.long)
    attention_mask_BT = torch.zeros(shape, dtype=torch.long)
    labels_BT = torch.full(shape, IGNORED, dtype=torch.long)
    for row, example in enumerate(examples):
        ids = torch.tensor(example.token_ids, dtype=torch.long)
        input_ids_BT[row, : len(ids)] = ids
        attention_mask_BT[row, : len(ids)] = 1
        has_loss = torch.tensor(example.has_loss, dtype=torch.bool)
        labels_BT[row, : len(ids)] = torch.where(has_loss, ids, IGNORED)
    return Batch(input_ids_BT, attention_mask_BT, labels_BT)


def cut_into_batches(
    examples: Sequence[Example], num_rows: int, padding_id: int
) -> Iterator[Batch]:
    """Yield all texts in order, `num_rows` at a time."""
    for start in range(0, len(examples), num_rows):
        yield make_batch(examples[start : start + num_rows], padding_id)


class ShuffledTexts:
    """Texts in an order of their own in each epoch, which follows from a seed."""

    def __init__(self, num_texts: int, seed: int) -> None:
        self._num_texts = num_texts
        self._seed = seed
        self._shuffle = lru_cache(maxsize=2)(self._shuffle_epoch)

    def take(self, start: int, count: int) -> list[int]:
        """Return which texts come next when `start` were taken since the run began.

        Epochs follow each other without a break: a batch may hold the last texts of one and the
        first of the next.
        """
        places = (divmod(place, self._num_texts) for place in range(start, start + count))
        return [self._shuffle(epoch)[place] for epoch, place in places]

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        order = list(range(self._num_texts))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order
