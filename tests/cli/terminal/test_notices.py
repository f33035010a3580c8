"""Log records as people see them on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from screens import Screen

from shoal.cli.terminal.notices import NoticeHandler, make_handler


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
