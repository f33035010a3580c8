"""Which texts make up which batch, as a pure function: a run that goes on takes the same ones.

Tensor suffixes: B rows, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..model.local_layers import IGNORED
from .dataset import Example


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
        labels_BT[row, example.num_prompt_tokens : len(ids)] = ids[example.num_prompt_tokens :]
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
