"""Text on terminals, pipes and consoles that know no UTF-8."""

from __future__ import annotations

import json
import random
import re
import textwrap
import threading
from typing import TextIO, cast

import pytest
from screens import Screen

from shoal.cli.terminal.terminal import CleanStream, Progress, Terminal, WordWrapper

SEED = 7


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", [10, 23, 80])
def test_wrapped_pieces_are_the_lines_of_the_whole_text(width: int) -> None:
    generator = random.Random(SEED)
    text = " ".join("x" * generator.randint(1, 9) for _ in range(200))
    wrapper = WordWrapper(width)

    shown, rest = "", text
    while rest:
        num_letters = generator.randint(1, 12)
        shown += wrapper.feed(rest[:num_letters])
        rest = rest[num_letters:]
    shown += wrapper.flush()

    assert shown == textwrap.fill(text, width), f"seed {SEED}"


def test_wrapper_keeps_paragraphs_and_indents_lines() -> None:
    wrapper = WordWrapper(12, indent="  ")

    shown = wrapper.feed("one two three\n\nfour") + wrapper.flush()

    assert shown == "  one two\n  three\n\n  four"


def test_wrapper_holds_half_a_word_back() -> None:
    wrapper = WordWrapper(80)

    assert wrapper.feed("a sen") == "a"
    assert wrapper.column == 1
    assert wrapper.feed("tence ") == " sentence"


def test_wrapper_breaks_scripts_without_spaces() -> None:
    wrapper = WordWrapper(8)

    assert wrapper.feed("日本語の文章") == "日本語の\n文章"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\x1b[31mx\x1b[0m"), (False, "x")])
def test_colours_are_for_terminals_only(is_terminal: bool, shown: str) -> None:
    screen = Screen(is_terminal=is_terminal)
    terminal = Terminal(screen)

    terminal.write(terminal.paint("x", "red"))

    assert screen.text == shown


def test_colours_obey_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    assert Terminal(Screen()).paint("x", "bold", "red") == "x"


CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
COPYING = "\x1b]52;c;c2hvYWw=\x07"  # OSC 52 writes to the clipboard
EIGHT_BITS = "\x9b2J\x9d0;title\x9c"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_are_left_out_but_tabs_and_newlines(
    encoding: str, is_terminal: bool
) -> None:
    screen = Screen(encoding, is_terminal)
    terminal = Terminal(screen)

    terminal.write("a" + CONTROLS + "b")
    terminal.redraw(terminal.paint("\rc" + COPYING + EIGHT_BITS, "red"))
    terminal.write("\x1b[31md")

    start, red, plain = ("\r", "\x1b[31m", "\x1b[0m") if is_terminal else ("", "", "")
    assert screen.text == f"a\t\nb{start}{red}c]52;c;c2hvYWw=2J0;title{plain}[31md"


def test_clean_stream_lets_nothing_but_progress_bars_through() -> None:
    screen = Screen()
    stream = CleanStream(screen)

    print("a" + CONTROLS, end="b\n", file=cast(TextIO, stream))
    stream.write("\r 45% \x1b[A\r")

    assert screen.text == "a\t\nb\n\r 45% [A"
    assert stream.isatty()


def test_json_escapes_every_control_character() -> None:
    screen = Screen()

    Terminal(screen).print_event("said", text=CONTROLS)

    assert re.fullmatch(r"[ -~]+\n", screen.text)
    assert json.loads(screen.text)["text"] == CONTROLS


def test_signs_have_a_plain_form_where_the_encoding_lacks_them() -> None:
    screen = Screen("ascii")

    Terminal(screen).print("✓ A → B … ☂")

    assert screen.text == "+ A > B . ?\n"


def test_width_is_at_most_eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert Terminal(Screen()).width == 80

    monkeypatch.setenv("COLUMNS", "60")
    assert Terminal(Screen()).width == 60


def test_sentence_is_wrapped_for_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")

    assert Terminal(Screen()).wrap("one two three four five") == ["one two three four", "  five"]
    assert Terminal(Screen(is_terminal=False)).wrap("one two " * 20) == ["one two " * 20]
    address = "/ip4/10.0.0.1/tcp/4001/p2p/12D3KooW"
    assert Terminal(Screen()).wrap(f"from {address}") == ["from", f"  {address}"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_leaves_pipes_and_dumb_terminals_alone(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(is_terminal=is_terminal)

    with Progress(Terminal(screen), lambda: "Working"):
        pass

    assert screen.text == ""


def test_half_a_line_is_ended_before_an_error() -> None:
    screen = Screen()
    terminal = Terminal(screen)

    def fail() -> None:
        with terminal.ending_lines():
            terminal.write("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert screen.text == "half\n"


def test_progress_makes_room_for_what_stays() -> None:
    screen = Screen()
    terminal, drawn, words = Terminal(screen), threading.Event(), iter(["Working"])

    def describe() -> str:
        if (word := next(words, None)) is None:
            drawn.set()
        return word or "Waiting"

    with Progress(terminal, describe):
        assert drawn.wait(30)
        terminal.print("A line.")

    assert "Working  0 s" in screen.text
    assert "\r\x1b[KA line.\n" in screen.text
