"""Files of token ids: written once, checked by their digests, and read by row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.errors import UsageError
from ..protocol.runs.training_run import Corpus, PartId, TokenShard, TrainingRun
from .tokenizer_files import read_tokenizer

_MOST_SHORT_IDS = 2**16


def choose_token_dtype(vocabulary_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the little-endian type that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocabulary_size <= _MOST_SHORT_IDS else "<u4")


def write_shard(path: Path, tokens: Iterable[int], vocabulary_size: int) -> TokenShard:
    """Write token ids into a file, and return what a run file says of it."""
    ids = np.fromiter(tokens, dtype=choose_token_dtype(vocabulary_size))
    ids.tofile(path)
    return TokenShard(path=path.name, num_tokens=len(ids), sha256=_compute_digest(path))


class _Rows:
    """The rows of token ids of several files, as if they were one."""

    def __init__(self, shards: Sequence[NDArray[np.unsignedinteger]], length: int) -> None:
        self._length = length
        self._shards = shards
        self._starts = [0, *accumulate(len(shard) for shard in shards)]

    def read(self, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens of rows and those that they predict, both [rows, tokens]."""
        tokens = torch.from_numpy(np.stack(list(map(self._read_row, rows))).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _read_row(self, row: int) -> NDArray[np.unsignedinteger]:
        """Return one token more than a row predicts."""
        start, stop = row * self._length, (row + 1) * self._length + 1
        pieces = [
            shard[max(start - first, 0) : max(stop - first, 0)]
            for first, shard in zip(self._starts, self._shards, strict=False)
            if start < first + len(shard) and first < stop
        ]
        return np.concatenate(pieces)


class TokenShards:
    """The shards of a corpus, mapped into memory as they are read."""

    def __init__(self, trained: _Rows, held_out: _Rows, tokenizer: Mapping[str, bytes]) -> None:
        self._trained = trained
        self._held_out = held_out
        self.tokenizer = tokenizer
        """Files of the tokenizer, by name."""

    @classmethod
    def open(cls, corpus: Corpus, folder: Path, vocabulary_size: int) -> TokenShards:
        """Open the files of a corpus, held-out ones too; relative paths begin at the folder.

        Raises UsageError, which names the file, where one is missing, has changed since the run
        file was written, or has ids beyond the vocabulary. So do the files of the tokenizer.
        """

        def open_rows(shards: Sequence[TokenShard]) -> _Rows:
            opened = [_open_shard(shard, folder, vocabulary_size) for shard in shards]
            return _Rows(opened, corpus.sequence_length)

        tokenizer = read_tokenizer(corpus, folder)
        return cls(open_rows(corpus.shards), open_rows(corpus.held_out), tokenizer)

    def read_part(self, run: TrainingRun, part: PartId) -> tuple[Tensor, Tensor]:
        """Return the tokens of a part and those that they predict, both [rows, tokens]."""
        return self._trained.read(run.list_rows(part))

    def read_held_out(self, run: TrainingRun, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a part of the held-out shards and those that they predict."""
        first = index * run.rows_per_part
        return self._held_out.read(range(first, first + run.rows_per_part))


def _open_shard(
    shard: TokenShard, folder: Path, vocabulary_size: int
) -> NDArray[np.unsignedinteger]:
    """Map a file into memory. Raises UsageError where it is not that of the run."""
    dtype, path = choose_token_dtype(vocabulary_size), folder / shard.path
    try:
        num_bytes = path.stat().st_size
        if num_bytes != shard.num_tokens * dtype.itemsize:
            raise UsageError(
                f"corpus shard {path} has {num_bytes} bytes, the run file makes it "
                f"{shard.num_tokens} tokens of {dtype.itemsize} bytes"
            )
        if _compute_digest(path) != shard.sha256:
            raise UsageError(f"corpus shard {path} is not the one of the run: its SHA-256 differs")
        ids = np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise UsageError(f"cannot read corpus shard {path}: {error.strerror}") from error
    if int(ids.max()) >= vocabulary_size:
        raise UsageError(
            f"corpus shard {path} has the token {int(ids.max())}, the vocabulary of the model ends "
            f"at {vocabulary_size - 1}"
        )
    return ids


def _compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
