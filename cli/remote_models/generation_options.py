"""The options of commands that generate text."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..options.join_options import add_join_arguments
from ..options.quantities import (
    parse_count,
    parse_fraction,
    parse_non_negative,
    parse_positive,
    parse_text,
    parse_whole,
)
from ..options.shared_options import add_wait_argument

_DTYPES = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Sampling:
    """Settings of one text; greedy unless one of the five sampling fields is given."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_beams: int = 1
    repetition_penalty: float | None = None
    stops: Sequence[str] = ()
    """Texts that end the generation, and are not part of it."""

    @property
    def is_greedy(self) -> bool:
        """Return whether decoding is greedy: always the likeliest token."""
        given = (self.temperature, self.top_p, self.top_k, self.min_p, self.seed)
        return self.temperature == 0 or all(value is None for value in given)

    def with_at_most(self, num_tokens: int) -> "Sampling":
        """Return the same settings for a text that may not be longer than that."""
        return replace(self, max_new_tokens=min(num_tokens, self.max_new_tokens))

    def to_arguments(self) -> dict[str, Any]:
        """Return arguments of transformers' generate()."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.num_beams,
            "do_sample": not self.is_greedy,
        }
        named: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if not self.is_greedy:
            named |= {"temperature": self.temperature, "top_p": self.top_p}
            named |= {"top_k": self.top_k, "min_p": self.min_p}
        if self.stops and self.num_beams > 1:  # else the filter of the stream finds them
            named["stop_strings"] = list(self.stops)
        return arguments | {name: value for name, value in named.items() if value is not None}


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Declare the swarm, the adapter, the sampling and what is kept where."""
    add_join_arguments(parser)
    parser.add_argument(
        "--adapter", metavar="DIR|DIGEST",
        help="folder written by `shoal finetune` or, for LoRA, by PEFT, or the digest of a "
        "published adapter",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=parse_count, default=max_new_tokens, metavar="N",
        help="maximum number of new tokens (default: %(default)s)",
    )  # fmt: skip
    _add_sampling_arguments(parser)
    add_wait_argument(parser, 20.0)
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="auto",
        help="data type of the embedding and the head on this machine (default: as stored)",
    )  # fmt: skip
    parser.add_argument(
        "--kv", choices=("float", "int8"), default="float",
        help="format of the KV cache on the peers; int8 takes a quarter to a half of the memory "
        "and is slightly less precise (default: %(default)s)",
    )  # fmt: skip


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=parse_non_negative, metavar="T",
        help="sampling temperature; 0 decodes greedily",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=parse_fraction, metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=parse_count, metavar="K", help="sample from the K most likely tokens"
    )
    parser.add_argument(
        "--min-p", type=parse_fraction, metavar="P",
        help="sample from tokens at least P times as likely as the likeliest",
    )  # fmt: skip
    parser.add_argument(
        "--repetition-penalty", type=parse_positive, metavar="R",
        help="divide the scores of tokens that the text has already by R; 1 is no penalty",
    )  # fmt: skip
    parser.add_argument(
        "--stop", action="append", default=[], type=parse_text, metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=parse_whole, metavar="S",
        help="sample with this random seed; the same seed gives the same text",
    )  # fmt: skip


def read_sampling(options: argparse.Namespace) -> Sampling:
    """Return the sampling that the options choose."""
    return Sampling(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.min_p,
        options.seed,
        options.beams,
        options.repetition_penalty,
        options.stop,
    )
