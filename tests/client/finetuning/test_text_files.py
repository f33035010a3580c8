"""Texts from files: what is read, and what is said of files that are wrong."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest

from shoal.client.finetuning.text_files import (
    MAX_LINE_BYTES,
    TrainingText,
    check_path,
    read_texts,
)
from shoal.protocol.errors import UsageError


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_jsonl_has_texts_and_prompts_with_completions(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "data.jsonl",
        '\ufeff{"text": "Zoë said", "id": 7}\r\n\n{"prompt": "2 + 2 =", "completion": " 4"}',
    )

    assert list(read_texts(path)) == [
        TrainingText(f"{path}:1", "Zoë said"),
        TrainingText(f"{path}:3", " 4", "2 + 2 ="),
    ]


def test_csv_has_the_columns_that_its_first_line_names(tmp_path: Path) -> None:
    path = write(
        tmp_path, "data.CSV", 'id,prompt, completion\n1,"one, two",three\n\n2,"a\nb",c\n3,d,e\n'
    )

    assert list(read_texts(path)) == [
        TrainingText(f"{path}:2", "three", "one, two"),
        TrainingText(f"{path}:4", "c", "a\nb"),
        TrainingText(f"{path}:6", "e", "d"),
    ]


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"instruction": "Add.", "input": "2 and 2", "output": "4", "text": "all of it"},
    {"instruction": "Add.", "input": "", "output": "4"},
]


def expect_rows(places: list[str]) -> list[TrainingText]:
    def make_turns(prompt: str) -> tuple[dict[str, str], ...]:
        return {"role": "user", "content": prompt}, CHAT[1]

    return [
        TrainingText(places[0], "", messages=tuple(CHAT)),
        TrainingText(places[1], "4", "Add.\n\n2 and 2\n\n", messages=make_turns("Add.\n\n2 and 2")),
        TrainingText(places[2], "4", "Add.\n\n", messages=make_turns("Add.")),
    ]


def test_rows_may_be_chats_or_instructions(tmp_path: Path) -> None:
    lines = write(tmp_path, "d.jsonl", "\n".join(map(json.dumps, ROWS)))
    listed = write(tmp_path, "d.json", json.dumps(ROWS))

    assert list(read_texts(lines)) == expect_rows([f"{lines}:{n}" for n in (1, 2, 3)])
    assert list(read_texts(listed)) == expect_rows([f"{listed}: item {n}" for n in (1, 2, 3)])


def test_tables_are_read_with_the_library_datasets(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "split")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "other")

    for name in ("d.parquet", "alone", "split"):
        path = tmp_path / name
        assert list(read_texts(path)) == [
            TrainingText(f"{path}: row 1", "b", "a"), TrainingText(f"{path}: row 2", "d", "c")
        ]  # fmt: skip
    with pytest.raises(UsageError, match="no split `train`; name the folder of one of test"):
        list(read_texts(tmp_path / "other"))


def test_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(UsageError, match=r"not installed: pip install datasets; \.jsonl, \.json"):
        list(read_texts(write(tmp_path, "d.parquet", "")))


def test_txt_has_a_text_for_each_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path, "data.txt", "\n\nOne\ntwo.\n \nThree.\n\n\n")

    assert list(read_texts(path)) == [
        TrainingText(f"{path}:3", "One\ntwo.", is_prose=True),
        TrainingText(f"{path}:6", "Three.", is_prose=True),
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("d.jsonl", "\n \n", "d.jsonl: the file holds no texts"),
        ("d.csv", "text\n", "d.csv: the file holds no texts"),
        ("d.txt", "\n\n", "d.txt: the file holds no texts"),
        ("d.jsonl", '{"text": "a"}\n{"text": "a"', "d.jsonl:2: the line is not JSON (Expecting"),
        ("d.jsonl", "[" * 100_000, "d.jsonl:1: the line is not JSON"),
        ("d.jsonl", "[1]", 'd.jsonl:1: the line is not a JSON object such as {"text": "…"}'),
        ("d.jsonl", '{"body": "a"}', "d.jsonl:1: expected `text`, `prompt` and `completion`"),
        ("d.jsonl", '{"text": "a", "prompt": "b"}', "found `text`, `prompt`"),
        ("d.jsonl", '{"prompt": "a"}', "d.jsonl:1: `completion` is missing"),
        ("d.jsonl", '{"completion": "a"}', "d.jsonl:1: `prompt` is missing"),
        ("d.jsonl", '{"text": 5}', "d.jsonl:1: `text` must be a string, not 5"),
        ("d.jsonl", '{"text": " "}', "d.jsonl:1: `text` is empty"),
        ("d.jsonl", '{"text": "\\ud800"}', "d.jsonl:1: `text` holds half of a surrogate pair"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "d.jsonl:2: the line is not UTF-8"),
        ("d.txt", "hello".encode("utf-16"), "d.txt:1: the line is not UTF-8"),
        (
            "d.csv",
            "body\nx\n",
            "d.csv:1: the first line must name the columns, `text`, `prompt`",
        ),
        ("d.csv", "text,text\nx,y\n", "d.csv:1: the first line must name the columns"),
        ("d.csv", "prompt,n\nx,y\n", "d.csv:2: `completion` is missing"),
        ("d.csv", "text,n\nx\n", "d.csv:2: the row and the first line have 1 and 2 cells"),
        ("d.csv", "prompt;completion\nx;y\n", "separate cells with commas, not ';'"),
        ("d.jsonl", "{\n", 'write an object such as {"text": "…"}'),
        ("d.csv", 'text\nx\n"open\n', "d.csv:3: the row is not CSV"),
        ("d.csv", 'text\n"' + "x\n" * 600_000, "d.csv:2: the row is not CSV (field larger"),
        ("d.xml", "{}", "d.xml: the file name must end in .jsonl, .json, .csv, .txt or .parquet"),
        ("d.json", "{}", 'd.json: expected a list of objects, [{"text": "…"}, …]'),
        ("d.json", "[{", "d.json: the file is not JSON (Expecting"),
        ("d.json", '[{"text": "a"}, 5]', "d.json: item 2 is not a JSON object"),
        ("d.json", '[{"text": "a"}, {}]', "d.json: item 2: expected `text`"),
        ("d.json", "[]", "d.json: the file holds no texts"),
        ("d.jsonl", '{"messages": "hi"}', "d.jsonl:1: `messages` must be a list such as"),
        ("d.jsonl", '{"messages": [{"role": "user"}]}', "`messages` must be a list such as"),
        (
            "d.jsonl",
            '{"messages": [{"role": "user", "content": "a"}]}',
            "d.jsonl:1: `messages` has no turn of the assistant",
        ),
        ("d.jsonl", '{"instruction": "a"}', "d.jsonl:1: `output` is missing"),
        ("d.parquet", "PAR1 not", "d.parquet can be read neither as parquet nor as a folder"),
    ],
)
def test_wrong_files_are_named_with_the_line(
    tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    path = write(tmp_path, name, content)

    with pytest.raises(UsageError) as raised:
        list(read_texts(path))

    assert sentence in str(raised.value)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize("name", ["missing", "missing.csv"])
def test_missing_file_is_named_whatever_its_ending(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be read from .*{name}: No such file"):
        list(read_texts(tmp_path / name))


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.txt"])
def test_endless_lines_are_refused_without_being_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, b"text\n" + b"x" * 16 * MAX_LINE_BYTES)
    tracemalloc.start()

    with pytest.raises(UsageError, match=f"{name}:[12]: the line is"):
        list(read_texts(path))

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * MAX_LINE_BYTES


def test_long_prose_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    line = b"word " * 200 + b"\n"
    path = write(tmp_path, "d.txt", line * 3000)

    texts = list(read_texts(path))

    assert max(len(text.completion) for text in texts) <= MAX_LINE_BYTES
    assert sum(text.completion.count("word") for text in texts) == 600_000


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no.jsonl", "No such file"),
        ("no.parquet", "No such file"),
        ("empty.jsonl", r"is a folder, but none of Dataset\.save_to_disk\(\)$"),
        ("data", r"is a folder, .*; give a file of it, such as .*/data/b\.jsonl$"),
    ],
)
def test_what_is_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # whether it is there or not
    (tmp_path / "empty.jsonl").mkdir()
    (tmp_path / "data").mkdir()
    for file in ("README.md", "b.jsonl", "c.csv"):
        write(tmp_path / "data", file, "")

    with pytest.raises(UsageError, match=sentence):
        check_path(tmp_path / name)
