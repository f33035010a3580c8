"""Texts to learn from, read from files that people have: jsonl, json, csv, txt, parquet, folders.

All but json are read piece by piece and never held as a whole. Errors name the file and the line:
`data.jsonl:17: the line is not JSON`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...protocol.errors import UsageError

MAX_LINE_BYTES = 2**20
"""About two hundred thousand words: more than any model takes at once."""

MAX_JSON_BYTES = 2**28
"""Of a file that is one JSON value; larger ones can be written line by line."""

_FORMATS = ".jsonl, .json, .csv, .txt or .parquet"
_COLUMNS = "`text`, `prompt` and `completion`, `messages`, or `instruction` and `output`"
_OBJECT = '{"text": "…"}'
_FILES_OF_DATASETS = "state.json", "dataset_dict.json"
"""One of them is in every folder that the library datasets has saved."""


@dataclass(frozen=True)
class TrainingText:
    """One text to learn, and where it stands. Of one with a prompt only the completion is learned.

    `place` is the file and the line, `data.jsonl:17`. Of prose nothing is lost: what is too long
    for one text becomes several. `messages` are the turns of a chat, of which those of the
    assistant are learned; where a tokenizer has no chat template, prompt and completion take their
    place, if there are any.
    """

    place: str
    completion: str
    prompt: str = ""
    is_prose: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()


def read_texts(path: str | Path) -> Iterator[TrainingText]:
    """Yield the texts of a file in order; its ending says how it is written.

    jsonl: an object in each line, with `text`, with `prompt` and `completion`, with `messages`, or
    with `instruction` and `output`. json: a list of such objects. csv: the same as columns, named
    in the first line. txt: paragraphs, between empty lines. parquet, and a folder that the library
    datasets saved: rows with these columns. Raises UsageError with the file and the line.
    """
    path = Path(path)
    reader = _find_reader(path)
    is_empty = True
    for text in reader(path):
        is_empty = False
        yield text
    if is_empty:
        raise UsageError(f"{path}: the file holds no texts")


def check_path(path: Path) -> None:
    """Raise UsageError for a path that cannot hold texts; reads none."""
    _find_reader(path)


def _find_reader(path: Path) -> Callable[[Path], Iterator[TrainingText]]:
    """Return the function that reads the texts of a path; raises UsageError where there is none."""
    if path.is_dir():
        _check_folder(path)
        return _read_table
    reader = _READERS.get(path.suffix.lower())
    if reader is None or not path.exists():
        _open(path).close()  # a missing file is named as such
        raise UsageError(
            f"{path}: the file name must end in {_FORMATS}, the formats that can be read"
        )
    return reader


def _check_folder(path: Path) -> None:
    """Raise UsageError unless the library datasets has written a folder."""
    try:
        files = sorted(file for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise UsageError(f"the data cannot be read from {path}: {error.strerror}") from error
    if {file.name for file in files}.intersection(_FILES_OF_DATASETS):
        return
    found = next((file for file in files if file.suffix.lower() in _READERS), None)
    advice = f"; give a file of it, such as {found}" if found else ""
    raise UsageError(f"{path} is a folder, but none of Dataset.save_to_disk(){advice}")


def _make_text(place: str, fields: Mapping[str, Any]) -> TrainingText:
    if "messages" in fields:
        return TrainingText(place, "", messages=_take_messages(place, fields["messages"]))
    if "instruction" in fields:
        prompt, answer = (_take_text(place, fields, name) for name in ("instruction", "output"))
        if fields.get("input"):
            prompt += "\n\n" + _take_text(place, fields, "input")
        turns = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
        return TrainingText(place, answer, prompt + "\n\n", messages=turns)
    has_text, has_parts = "text" in fields, "prompt" in fields or "completion" in fields
    if has_text == has_parts:
        found = ", ".join(f"`{name}`" for name in list(fields)[:5]) or "nothing"
        raise UsageError(f"{place}: expected {_COLUMNS}, found {found:.200}")
    if has_text:
        return TrainingText(place, _take_text(place, fields, "text"))
    completion = _take_text(place, fields, "completion")
    return TrainingText(place, completion, _take_text(place, fields, "prompt"))


def _take_messages(place: str, given: Any) -> tuple[Mapping[str, Any], ...]:
    messages = list(given) if isinstance(given, list | tuple) else []
    if not messages or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one
        for one in messages
    ):
        raise UsageError(
            f'{place}: `messages` must be a list such as [{{"role": "user", "content": "…"}}, …]'
        )
    turns = tuple(
        {"role": one["role"], "content": _take_text(place, one, "content")} for one in messages
    )
    if not any(turn["role"] == "assistant" for turn in turns):
        raise UsageError(f"{place}: `messages` has no turn of the assistant, so nothing to learn")
    return turns


def _take_text(place: str, fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise UsageError(f"{place}: `{name}` is missing")
    text = fields[name]
    if not isinstance(text, str):
        raise UsageError(f"{place}: `{name}` must be a string, not {text!r:.40}")
    if not text.strip():
        raise UsageError(f"{place}: `{name}` is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can name half a letter: "\ud800"
        raise UsageError(
            f"{place}: `{name}` holds half of a surrogate pair (\\ud800 to \\udfff)"
        ) from error
    return text


def _read_objects(path: Path) -> Iterator[TrainingText]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f" ({error.msg})" if isinstance(error, json.JSONDecodeError) else ""
            raise UsageError(
                f"{place}: the line is not JSON{reason}; write an object such as {_OBJECT}"
            ) from error
        if not isinstance(fields, dict):
            raise UsageError(f"{place}: the line is not a JSON object such as {_OBJECT}")
        yield _make_text(place, fields)


def _read_list(path: Path) -> Iterator[TrainingText]:
    with _open(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise UsageError(f"{path} is larger than {MAX_JSON_BYTES} bytes; write a .jsonl file")
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: the file is not JSON ({error!s:.80})") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path}: expected a list of objects, [{_OBJECT}, …]; or use .jsonl")
    for number, fields in enumerate(rows, 1):
        if not isinstance(fields, dict):
            raise UsageError(f"{path}: item {number} is not a JSON object such as {_OBJECT}")
        yield _make_text(f"{path}: item {number}", fields)


def _read_table(path: Path) -> Iterator[TrainingText]:
    """Read a parquet file, or a folder of `Dataset.save_to_disk()`, with the library datasets."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{path}: parquet files and folders are read with the library datasets, which is not "
            f"installed: pip install datasets; {_FORMATS.replace(' or .parquet', '')} need nothing"
        ) from error
    try:
        if path.is_dir():
            rows: Any = datasets.load_from_disk(str(path))
        else:
            _open(path).close()
            files = {"train": str(path)}
            rows = datasets.load_dataset("parquet", data_files=files, streaming=True)
        if isinstance(rows, dict) and "train" not in rows:
            names = ", ".join(rows)
            raise UsageError(f"{path} has no split `train`; name the folder of one of {names}")
        for number, fields in enumerate(rows["train"] if isinstance(rows, dict) else rows, 1):
            yield _make_text(f"{path}: row {number}", fields)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} can be read neither as parquet nor as a folder of Dataset.save_to_disk(): "
            f"{' '.join(str(error).split())!s:.120}"
        ) from error


def _read_rows(path: Path) -> Iterator[TrainingText]:
    # The limit is the process's, and lower than that of lines.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    with closing(_read_lines(path)) as lines:
        yield from _read_cells(path, csv.reader((line for _, line in lines), strict=True))


def _read_cells(path: Path, rows: Any) -> Iterator[TrainingText]:
    names = [name.strip() for name in next(_split(path, rows), (0, ["text"]))[1]]
    if len(set(names)) != len(names) or not {"text", "prompt", "instruction"} & set(names):
        found = ", ".join(names)
        other = next((sign for sign in ";\t|" if len(names) == 1 and sign in found), "")
        advice = f"; separate cells with commas, not {other!r}" if other else ""
        raise UsageError(
            f"{path}:1: the first line must name the columns, {_COLUMNS}, "
            f"not {found!r:.200}{advice}"
        )
    for number, cells in _split(path, rows):
        if not cells:
            continue
        place = f"{path}:{number}"
        if len(cells) != len(names):
            raise UsageError(
                f"{place}: the row and the first line have {len(cells)} and {len(names)} cells; "
                'quote cells with commas: "one, two"'
            )
        yield _make_text(place, dict(zip(names, cells, strict=True)))


def _split(path: Path, rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of the line that it begins in."""
    while True:
        number = rows.line_num + 1
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise UsageError(f"{path}:{number}: the row is not CSV ({error})") from error
        yield number, cells


def _read_paragraphs(path: Path) -> Iterator[TrainingText]:
    for number, paragraph in _join_paragraphs(_read_lines(path)):
        yield TrainingText(f"{path}:{number}", paragraph, is_prose=True)


def _join_paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, and the number of the first line of each; no longer ones than a line."""
    start, held, num_letters = 1, list[str](), 0
    for number, line in lines:
        is_empty = not line.strip()
        if held and (is_empty or num_letters + len(line) > MAX_LINE_BYTES):
            yield start, "".join(held).rstrip()
            held, num_letters = [], 0
        if not is_empty:
            start = start if held else number
            held.append(line)
            num_letters += len(line)
    if held:
        yield start, "".join(held).rstrip()


def _read_lines(path: Path) -> Generator[tuple[int, str]]:
    """Yield each line with its number, from 1 on."""
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise UsageError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES} bytes")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}:{number}: the line is not UTF-8; convert the file"
                ) from error
            # The byte order mark that some editors write is not a part of the text.
            yield number, text.removeprefix("\ufeff") if number == 1 else text


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"the data cannot be read from {path}: {error.strerror}") from error


_READERS: Mapping[str, Callable[[Path], Iterator[TrainingText]]] = {
    ".jsonl": _read_objects, ".json": _read_list, ".csv": _read_rows, ".txt": _read_paragraphs,
    ".parquet": _read_table,
}  # fmt: skip
