"""What is said of training texts before anything takes time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.cli.finetuning import run_texts
from shoal.cli.finetuning.run_texts import check_texts
from shoal.protocol.errors import UsageError


def test_first_texts_are_checked_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": 3}\n')

    with pytest.raises(UsageError, match=r"d\.jsonl:3: `text` must be a string"):
        check_texts(path)
    monkeypatch.setattr(run_texts, "MOST_CHECKED", 2)
    check_texts(path)


def test_pipe_is_left_to_who_reads_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.jsonl")

    check_texts(tmp_path / "d.jsonl")  # it would wait for a writer
