"""Log records as people see them on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from screens import Screen

from shoal.cli.terminal.notices import NoticeHandler, RepeatMerger, make_handler


def test_warning_is_a_sentence_with_the_time_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    error = "no node of the directory keeps our announcement, nor does any peer that it knows of"
    record = logging.LogRecord(
        "shoal.peer", logging.WARNING, "", 0, "could not renew it: %s", (error,), None
    )

    NoticeHandler().handle(record)

    lines = screen.text.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d Could not renew it: {error}\.", " ".join(map(str.strip, lines))
    )


def test_exception_is_printed_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    error = RuntimeError("out of luck")
    record = logging.LogRecord(
        "shoal.peer", logging.ERROR, "", 0, "a task failed", (), (RuntimeError, error, None)
    )

    NoticeHandler().handle(record)

    assert screen.text[8:] == " A task failed.\nRuntimeError: out of luck\n"


class _Shown(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _log(handler: logging.Handler, text: str, at: float, level: int = logging.WARNING) -> None:
    record = logging.LogRecord("shoal.peer", level, "", 0, "%s", (text,), None)
    record.created = at
    handler.handle(record)


def test_repeated_warning_is_told_once_and_counted_when_it_has_ended() -> None:
    shown = _Shown()
    merger = RepeatMerger(shown)
    for at in range(0, 60, 15):
        _log(merger, "cannot renew", at)
    _log(merger, "cannot renew: another reason", 60)
    assert shown.texts == ["cannot renew", "cannot renew: another reason"]

    _log(merger, "cannot read", 700)

    ended, newest = shown.texts[2:]
    assert re.fullmatch(r"cannot renew \(repeated 3 times until \d\d:\d\d:45\)", ended)
    assert newest == "cannot read"
    _log(merger, "cannot renew", 701)
    assert shown.texts[-1] == "cannot renew"


def test_repeated_warning_is_counted_when_the_process_ends() -> None:
    shown = _Shown()
    merger = RepeatMerger(shown)
    for at in (0, 15):
        _log(merger, "cannot renew", at)
    _log(merger, "cannot read", 16)

    merger.close()

    assert [text.partition(" until")[0] for text in shown.texts] == [
        "cannot renew", "cannot read", "cannot renew (repeated once",
    ]  # fmt: skip


def test_news_is_told_each_time() -> None:
    shown = _Shown()
    merger = RepeatMerger(shown)
    for at in (0, 15):
        _log(merger, "the directory is back", at, logging.INFO)

    assert shown.texts == ["the directory is back"] * 2


def test_only_so_many_warnings_are_remembered() -> None:
    shown = _Shown()
    merger = RepeatMerger(shown)
    for at in (0, 1):
        for number in range(1000):
            _log(merger, f"cannot serve {number}", at)

    assert len(shown.texts) == 2000


def test_record_is_a_line_of_json_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    error = RuntimeError("out of\x1b[2J luck")
    record = logging.LogRecord(
        "shoal.peer", logging.ERROR, "", 0, "a %s\nfailed", ("task",), (RuntimeError, error, None)
    )

    make_handler("json").handle(record)

    (line,) = screen.text.splitlines()
    facts = json.loads(line)
    assert facts.pop("time") == pytest.approx(record.created, abs=0.001)
    assert facts == {
        "level": "error",
        "logger": "shoal.peer",
        "message": "a task\nfailed",
        "traceback": "RuntimeError: out of\x1b[2J luck\n",
    }
    assert "\x1b" not in line
