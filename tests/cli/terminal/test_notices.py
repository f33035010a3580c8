"""Log records as people see them on stderr."""

from __future__ import annotations

import logging
import re
import sys

import pytest
from screens import Screen

from shoal.cli.terminal.notices import NoticeHandler


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
