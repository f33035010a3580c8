"""What a person sees of a text: its prompt, its words, and what interrupts it."""

from __future__ import annotations

import threading

import pytest
from screens import Screen

from shoal.cli.terminal.terminal import Terminal
from shoal.cli.terminal.text_printer import ChangeNotices, TextPrinter

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("prompt", "pieces", "shown"),
    [
        ("there was", [" a", " girl"], f"{DIM}there was{PLAIN} a girl\n"),
        ("there wa", ["s", " a"], f"{DIM}there{PLAIN} was a\n"),
        ("there was", [], f"{DIM}there was{PLAIN}\n"),
    ],
)
def test_prompt_is_told_from_what_follows(prompt: str, pieces: list[str], shown: str) -> None:
    screen = Screen()
    printer = TextPrinter(Terminal(screen), Terminal(Screen()), prompt)

    for piece in pieces:
        printer.add(piece)
    printer.end()

    assert screen.text == shown


def test_interruption_gets_its_own_line_where_it_stands_among_the_words() -> None:
    screen = Screen()
    printer = TextPrinter(Terminal(screen), Terminal(screen), "Once")

    printer.add(" upon a ti")
    printer.interrupt("Waiting for blocks 4:8")
    printer.add("me")
    printer.end()

    lines = screen.text.replace(DIM, "").replace(PLAIN, "").splitlines()
    assert lines == ["Once upon a ti", "Waiting for blocks 4:8", "me"]


@pytest.mark.parametrize("shows_text", [True, False])
def test_interruption_leaves_a_piped_text_alone(shows_text: bool) -> None:
    pipe, notices = Screen(is_terminal=False), Screen(is_terminal=False)
    printer = TextPrinter(Terminal(pipe) if shows_text else None, Terminal(notices), "Once")

    printer.add(" upon")
    printer.interrupt("Waiting for blocks 4:8")
    printer.add(" a time")
    printer.end()

    assert pipe.text == " upon a time\n" * shows_text
    assert notices.text == "Waiting for blocks 4:8\n"


def test_outage_is_said_once_each_time() -> None:
    sought, said, was_said = ["4:8"], list[str](), threading.Event()

    def notify(words: str) -> None:
        said.append(words)
        was_said.set()

    with ChangeNotices(lambda: sought[0], notify, patience_seconds=0.1):
        for words in ("4:8", "", "0:4"):
            sought[0] = words
            if words:
                assert was_said.wait(60)
                was_said.clear()

    assert said == ["4:8", "0:4"]
