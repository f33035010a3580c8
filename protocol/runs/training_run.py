"""A training run: its model, corpus, updates and optimizer, as its owner wrote them.

An update is a named set of parts. Part (u, i) is a fixed range of rows of the corpus, so that every
peer knows what belongs to an update, and a part that is lost can be computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from ..errors import UsageError
from ..limits import MAX_BLOCKS, MAX_PARTS, MAX_STAGES, MAX_UPDATES
from ..spans import Span

MAX_ROWS = 1024
MAX_SEQUENCE_LENGTH = 2**17
MAX_SHARDS = 4096
_MAX_FIELD_CHARACTERS = 80
"""Of what a file calls a setting that we do not know."""

Mode = Literal["exact", "int8"]
"""How members of a run send activations and gradients: exactly, or as 8-bit integers."""

Precision = Literal["fp32", "bf16"]
"""In what products of a run are computed. Weights, norms, losses and sums stay in fp32."""

_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
_DIGEST = r"^[0-9a-f]{64}$"
_PATH = r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$"
_IN_WORDS = {
    _NAME: "1 to 63 lower-case letters, digits and hyphens, and begin with no hyphen",
    _DIGEST: "64 hexadecimal digits in lower case, as sha256sum prints them",
    _PATH: "below the folder of the corpus, of names of letters, digits, '_', '-' and '.'",
}
"""What texts of these patterns must be."""

_Name = Annotated[str, StringConstraints(pattern=_NAME)]
_Digest = Annotated[str, StringConstraints(pattern=_DIGEST)]
_Rate = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@dataclass(frozen=True, order=True)
class PartId:
    """Microbatch `index` of update `update`."""

    update: int
    index: int

    def __str__(self) -> str:
        return f"part {self.index} of update {self.update}"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenShard(_Table):
    """A file of token ids, as little-endian numbers of two bytes (four above 65,536 ids)."""

    path: Annotated[str, StringConstraints(pattern=_PATH, max_length=255)]
    """Below the folder of the corpus: runs of others name no file elsewhere."""
    num_tokens: Annotated[int, Field(ge=2, le=2**40)]
    sha256: _Digest


class TokenizerFile(_Table):
    """A file of the tokenizer that made the token ids, beside the shards."""

    path: Literal[
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
    ]
    """As transformers calls it. It is copied beside exported weights, so it may be nothing else."""
    sha256: _Digest


class Corpus(_Table):
    """The text of a run: shards in their order, as if they were one file."""

    shards: Annotated[
        tuple[TokenShard, ...], Field(min_length=1, max_length=MAX_SHARDS, strict=False)
    ]
    sequence_length: Annotated[int, Field(ge=1, le=MAX_SEQUENCE_LENGTH)]
    """Tokens that one row predicts."""
    held_out: Annotated[tuple[TokenShard, ...], Field(max_length=MAX_SHARDS, strict=False)] = ()
    """Text that is never trained on; the loss on it shows what the model has learned."""
    entropy: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """Nats per token, where it is known: no model has a smaller loss on text that it never saw."""

    tokenizer: Annotated[tuple[TokenizerFile, ...], Field(max_length=8, strict=False)] = ()
    """What turns text into the token ids; exported models get a copy."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [file.path for file in self.tokenizer]
        if len(set(names)) < len(names):
            raise ValueError("tokenizer: a file is named twice")
        trained = {shard.sha256: shard.path for shard in self.shards}
        for shard in self.held_out:
            if shard.sha256 in trained:
                raise ValueError(
                    f"held_out: {shard.path} is the same text as {trained[shard.sha256]}, which is "
                    "trained on"
                )
        return self

    @property
    def num_rows(self) -> int:
        """Rows of the corpus. Each begins with the token that the row before it predicted last."""
        return self._count_rows(self.shards)

    @property
    def num_held_out_rows(self) -> int:
        """Rows of the held-out shards."""
        return self._count_rows(self.held_out)

    def _count_rows(self, shards: Sequence[TokenShard]) -> int:
        return max(sum(shard.num_tokens for shard in shards) - 1, 0) // self.sequence_length


class Optimizer(_Table):
    """AdamW (Loshchilov and Hutter, 2019), or Muon for matrices of blocks and AdamW for the rest.

    "adamw8bit" is AdamW whose state has 8 bits per number (Dettmers and others, 2022). Muon (Jordan
    et al., 2024) takes its learning rate in AdamW's scale. SGD is plain, without momentum, so that
    a run can be compared with other programs to the last bits.
    """

    name: Literal["muon", "adamw", "adamw8bit", "sgd"] = "muon"
    learning_rate: _Rate
    """The highest; of the matrices under Muon, of all parameters otherwise."""
    adamw_learning_rate: _Rate | None = None
    """Of what AdamW updates beside Muon; None: the same."""
    weight_decay: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    betas: Annotated[tuple[_Decay, _Decay], Field(strict=False)] = (0.9, 0.95)
    """Of AdamW."""
    momentum: _Decay = 0.95
    """Of Muon."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The largest norm of the gradient of all stages together."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, takers in _TAKERS.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.name not in takers:
                raise ValueError(
                    f"{name} is a setting of {', '.join(takers)}; {self.name} ignores it"
                )
        return self


_TAKERS = {
    "adamw_learning_rate": ("muon",),
    "momentum": ("muon",),
    "betas": ("muon", "adamw", "adamw8bit"),
}
"""Which optimizers take the settings that not all of them have."""


class LearningRateSchedule(_Table):
    """Linear warmup, then a cosine down to a fraction of the highest learning rate."""

    warmup_updates: Annotated[int, Field(ge=0, le=MAX_UPDATES)] = 0
    final_fraction: _Fraction = 0.1


class TrainingRun(_Table):
    """A training run. Its members agree on it by a signed record: see run_record.py.

    Records leave out what has its default. So a new setting needs one, which never changes.
    """

    name: _Name
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Of the initial weights, the order of the corpus and dropout."""
    model: dict[str, Any]
    """Content of the model's config.json."""
    stage_borders: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=MAX_BLOCKS)], ...],
        Field(max_length=MAX_STAGES - 1, strict=False),
    ] = ()
    """First blocks of all stages but the first one, in order."""
    corpus: Corpus
    num_updates: Annotated[int, Field(ge=1, le=MAX_UPDATES)]
    parts_per_update: Annotated[int, Field(ge=1, le=MAX_PARTS)]
    rows_per_part: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    mode: Mode = "exact"
    precision: Precision = "fp32"
    optimizer: Optimizer
    schedule: LearningRateSchedule = LearningRateSchedule()
    held_out_every: Annotated[int, Field(ge=1, le=MAX_UPDATES)] | None = None
    """Updates from one measurement of the held-out loss to the next; None: only the last update is
    followed by one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in self.model.items():
            if not _can_be_json(value):
                raise ValueError(f"model: {name:.60} must be without dates, NaN and infinity")
        borders = (0, *self.stage_borders)
        if any(start >= stop for start, stop in pairwise(borders)):
            raise ValueError("stage_borders must increase")
        if self.corpus.num_rows < self.rows_per_part:
            raise ValueError(
                f"corpus has {self.corpus.num_rows} rows of {self.corpus.sequence_length} tokens, "
                f"one part takes {self.rows_per_part}: lower rows_per_part or "
                "corpus.sequence_length, or add shards"
            )
        if self.schedule.warmup_updates >= self.num_updates:
            raise ValueError(
                f"schedule.warmup_updates must be less than num_updates, {self.num_updates}"
            )
        if self.corpus.held_out and not 1 <= self.num_held_out_parts <= MAX_PARTS:
            raise ValueError(
                f"corpus.held_out has {self.corpus.num_held_out_rows} rows of "
                f"{self.corpus.sequence_length} tokens, which must be 1 to {MAX_PARTS} parts of "
                f"{self.rows_per_part} rows"
            )
        if self.held_out_every is not None and not self.corpus.held_out:
            raise ValueError("held_out_every: corpus.held_out names no shards")
        return self

    @property
    def num_held_out_parts(self) -> int:
        """Parts of the held-out shards, in their order; rows that fill no part are left out."""
        return self.corpus.num_held_out_rows // self.rows_per_part

    def has_held_out_loss(self, num_updates: int) -> bool:
        """Return whether the held-out loss is measured after so many updates."""
        if not self.corpus.held_out or not num_updates:
            return False
        every = self.held_out_every or self.num_updates
        return num_updates == self.num_updates or num_updates % every == 0

    @property
    def tokens_per_update(self) -> int:
        """Tokens that an update predicts."""
        return self.parts_per_update * self.rows_per_part * self.corpus.sequence_length

    def list_stages(self, num_blocks: int) -> list[Span]:
        """Return the spans of all stages of a model with so many blocks.

        Raises UsageError where a border is none of its blocks.
        """
        if self.stage_borders and self.stage_borders[-1] >= num_blocks:
            raise UsageError(
                f"stage_borders: the model has blocks 0:{num_blocks}, no stage can begin with "
                f"block {self.stage_borders[-1]}"
            )
        edges = (0, *self.stage_borders, num_blocks)
        return [Span(start, stop) for start, stop in pairwise(edges)]

    def list_rows(self, part: PartId) -> list[int]:
        """Return the rows of the corpus that a part consists of.

        Parts take the rows in an order that depends on the seed. When all are used, another order
        begins.
        """
        first = (part.update * self.parts_per_update + part.index) * self.rows_per_part
        num_rows = self.corpus.num_rows
        return [
            _permute(number % num_rows, num_rows, f"{self.seed}/{number // num_rows}")
            for number in range(first, first + self.rows_per_part)
        ]

    def derive_seed(self, *names: object) -> int:
        """Return a seed of 63 bits for the random numbers of a named purpose."""
        text = "/".join(map(str, (self.seed, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def compute_learning_rate_factor(self, update: int) -> float:
        """Return the factor of the highest learning rate in an update.

        Warmup ends with the highest rate; the last update has the final fraction of it.
        """
        warmup = self.schedule.warmup_updates
        if update < warmup:
            return (update + 1) / (warmup + 1)
        num_after = max(self.num_updates - 1 - warmup, 1)
        progress = min((update - warmup) / num_after, 1.0)
        final = self.schedule.final_fraction
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def read_run(content: Mapping[str, object]) -> TrainingRun:
    """Check what a run file holds; UsageError names the first wrong field and what it must be.

    Fields that no run has come before those that are missing, which may be the same, misspelt.
    """
    try:
        return TrainingRun.model_validate(content)
    except ValidationError as found:
        errors = found.errors(include_url=False, include_input=False)
    error = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    field = ".".join(map(str, error["loc"]))[:_MAX_FIELD_CHARACTERS]
    problem = _describe(field, error["type"], error["msg"], error.get("ctx", {}))
    raise UsageError(f"run file: {field}: {problem}" if field else f"run file: {problem}")


_TABLES = {
    "": TrainingRun,
    "corpus.": Corpus,
    "corpus.shards.": TokenShard,
    "optimizer.": Optimizer,
    "schedule.": LearningRateSchedule,
}


def _describe(field: str, kind: str, message: str, limits: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, and what it must be."""
    match kind:
        case "extra_forbidden":
            known = [
                prefix + name for prefix, table in _TABLES.items() for name in table.model_fields
            ]
            near = get_close_matches(field, known, 1)
            return "a run has no such setting" + (f"; did you mean {near[0]}?" if near else "")
        case "missing":
            return "this setting is required"
        case "string_pattern_mismatch":
            return f"must be {_IN_WORDS[limits['pattern']]}"
        case "dict_type" | "model_type":
            return "must be a table"
        case "tuple_type":
            return "must be a list"
        case "too_long":
            return f"must have at most {limits['max_length']} items, not {limits['actual_length']}"
        case "too_short":
            return f"must have at least {limits['min_length']} items, not {limits['actual_length']}"
        case _:
            return message.removeprefix("Value error, ").replace("Input should", "must")


def _can_be_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _permute(index: int, size: int, key: str) -> int:
    """Return where a keyed permutation of 0 to size - 1 puts an index.

    A Feistel network over the next power of four, walked along its cycle until it is inside (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): four steps at most on average.
    """
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for stage in range(4):
            digest = hashlib.blake2b(f"{key}/{stage}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index
