"""Reads the training texts of `shoal finetune` and turns them into tokens."""

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...client.finetuning.text_files import TrainingText, check_path
from ...client.finetuning.text_files import read_texts as read_file
from ...protocol.errors import UsageError
from ..options.quantities import count_of
from .run_options import MAX_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...client.finetuning.dataset import Dataset

_MAX_PROMPT_LETTERS = 40

MOST_CHECKED = 10_000
"""Texts that are looked at before anything heavy is imported."""


@dataclass(frozen=True)
class RunTexts:
    """The training texts of a run."""

    dataset: "Dataset"
    max_length: int
    prompt: str
    """For the command that tries the trained weights."""


def check_texts(path: Path) -> None:
    """Raise UsageError for a path without texts, and for the first wrong ones of many.

    Takes a second at most: what can be read only once is not read, nor what takes a library.
    """
    check_path(path)
    if path.is_file() and path.suffix.lower() != ".parquet":
        for _ in itertools.islice(read_file(path), MOST_CHECKED):
            pass


def read_texts(
    name: str, tokenizer: "PreTrainedTokenizerBase", options: argparse.Namespace
) -> RunTexts:
    """Read the data and turn it into tokens; the swarm is not needed for that."""
    from ...client.finetuning.dataset import make_dataset

    num_positions = _count_positions(name)
    if options.method != "lora":
        if num_positions - options.pre_seq_len < 2:
            raise UsageError(
                f"--pre-seq-len {options.pre_seq_len} leaves no room for text: the model has "
                f"{num_positions} positions"
            )
        num_positions -= options.pre_seq_len
    max_length = options.max_length or min(MAX_LENGTH, num_positions)
    if not 2 <= max_length <= num_positions:
        raise UsageError(
            f"texts of {max_length} tokens are not possible: this model takes 2 to {num_positions}"
            + (" next to a soft prompt of this length" if options.method != "lora" else "")
        )
    texts = read_file(options.data)
    first = next(texts)
    texts = itertools.chain([first], texts)
    made = make_dataset(texts, tokenizer, max_length, options.eval, options.seed)
    return RunTexts(made, max_length, _choose_prompt(first))


def describe_limits(dataset: "Dataset", max_length: int) -> Iterator[str]:
    """Yield sentences about texts that were cut or left out, of all with those for evaluation."""
    total = len(dataset.training) + len(dataset.evaluation) + dataset.num_left_out
    for number, what in (
        (dataset.num_cut, f"longer than {max_length} tokens and truncated (--max-length)"),
        (
            dataset.num_left_out,
            f"skipped: the first {max_length} tokens hold nothing to learn",
        ),
    ):
        if number:
            verb = "is" if number == 1 else "are"
            yield f"{number:,} of {count_of(total, 'text')} {verb} {what}"


def _choose_prompt(text: TrainingText) -> str:
    """Return a prompt to try the trained weights with: the prompt of a text, or its first words.

    It has no characters that are special in a shell; … stands for one that would.
    """
    words = (text.prompt or text.completion).split()
    prompt = " ".join(words if text.prompt else words[:4])
    is_plain = len(prompt) <= _MAX_PROMPT_LETTERS and not set(prompt) & set('"$`\\!')
    return prompt if is_plain else "…"


def _count_positions(name: str) -> int:
    from ...client.model.local_layers import open_checkpoint

    _, config = open_checkpoint(name, revision=None)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
