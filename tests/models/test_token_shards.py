"""Shards of token ids: rows across files, and files that are not those of the run."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_runs import NO_SHARD, VOCABULARY, describe_run, open_run, write_tokenizer

from shoal.models.token_shards import TokenShards, write_shard
from shoal.models.tokenizer_files import read_tokenizer
from shoal.protocol.errors import UsageError
from shoal.protocol.runs.training_run import Corpus, PartId, read_run


def test_rows_continue_from_one_shard_into_the_next(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / name, tokens, 100).model_dump()
        for name, tokens in (("a", range(7)), ("b", range(7, 10)), ("c", range(10, 21)))
    ]
    corpus = {"shards": shards, "sequence_length": 5}
    run = read_run(describe_run(corpus=corpus, rows_per_part=4))

    tokens, labels = TokenShards.open(run.corpus, tmp_path, 100).read_part(run, PartId(0, 0))

    assert run.corpus.num_rows == 4
    assert tokens.flatten().sort().values.tolist() == list(range(20))
    assert torch.equal(labels, tokens + 1)


def test_held_out_rows_come_in_their_order(tmp_path: Path) -> None:
    trained, one, other = (
        write_shard(tmp_path / name, tokens, 100).model_dump()
        for name, tokens in (("a", range(50, 60)), ("b", range(7)), ("c", range(7, 22)))
    )
    corpus = {"shards": [trained], "held_out": [one, other], "sequence_length": 4}
    run = read_run(describe_run(corpus=corpus, rows_per_part=2))
    shards = TokenShards.open(run.corpus, tmp_path, 100)

    parts = [shards.read_held_out(run, index) for index in range(run.num_held_out_parts)]

    assert [tokens.flatten().tolist() for tokens, _ in parts] == [
        list(range(8)), list(range(8, 16)),
    ]  # fmt: skip
    assert all(torch.equal(labels, tokens + 1) for tokens, labels in parts)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a", [0, 70_000, 99_999], 100_000)
    corpus = {"shards": [shard.model_dump()], "sequence_length": 2}
    run = read_run(describe_run(corpus=corpus, rows_per_part=1))

    tokens, labels = TokenShards.open(run.corpus, tmp_path, 100_000).read_part(run, PartId(0, 0))

    assert (tokens.tolist(), labels.tolist()) == ([[0, 70_000]], [[70_000, 99_999]])


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda file: file.unlink(), "cannot read corpus shard .*1.bin: No such file"),
        (lambda file: file.write_bytes(b"\0\0"), "has 2 bytes, the run file makes it 1300 tokens"),
        (
            lambda file: file.write_bytes(file.read_bytes()[2:] + b"\7\0"),
            "1.bin is not the one of the run: its SHA-256 differs",
        ),
    ],
)
def test_shards_that_are_not_those_of_the_run_are_named(
    tmp_path: Path, break_it: Callable[[Path], object], complaint: str
) -> None:
    run, _ = open_run(tmp_path)

    break_it(tmp_path / "1.bin")

    with pytest.raises(UsageError, match=complaint):
        TokenShards.open(run.corpus, tmp_path, VOCABULARY)


def test_held_out_shard_that_has_changed_is_named(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, num_held_out=100)

    file = tmp_path / "held-out.bin"
    file.write_bytes(file.read_bytes()[2:] + b"\7\0")

    with pytest.raises(UsageError, match=r"held-out.bin is not the one of the run"):
        TokenShards.open(run.corpus, tmp_path, VOCABULARY)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda file: file.unlink(), "cannot read tokenizer file .*tokenizer.json: No such file"),
        (lambda file: file.write_text("{}"), "tokenizer.json is not the one of the run"),
        (lambda file: os.truncate(file, 2**25 + 1), "tokenizer.json has more than 33554432 bytes"),
    ],
)
def test_tokenizer_that_is_not_that_of_the_run_is_named(
    tmp_path: Path, break_it: Callable[[Path], object], complaint: str
) -> None:
    run, _ = open_run(tmp_path)
    named = {"shards": run.corpus.model_dump()["shards"], "sequence_length": 16}
    corpus = Corpus.model_validate({**named, "tokenizer": write_tokenizer(tmp_path)})
    assert list(TokenShards.open(corpus, tmp_path, VOCABULARY).tokenizer) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]

    break_it(tmp_path / "tokenizer.json")

    with pytest.raises(UsageError, match=complaint):
        TokenShards.open(corpus, tmp_path, VOCABULARY)


def test_tokenizer_that_names_code_is_refused(tmp_path: Path) -> None:
    content = b'{"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", null]}}'
    file = tmp_path / "tokenizer_config.json"
    file.write_bytes(content)
    named = [{"path": file.name, "sha256": hashlib.sha256(content).hexdigest()}]
    corpus = Corpus.model_validate({"shards": [NO_SHARD], "sequence_length": 4, "tokenizer": named})

    with pytest.raises(UsageError, match="names code to download"):
        read_tokenizer(corpus, tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path)

    with pytest.raises(UsageError, match="the vocabulary of the model ends at 9"):
        TokenShards.open(run.corpus, tmp_path, 10)
