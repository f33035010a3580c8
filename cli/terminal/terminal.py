"""Output to a terminal: colours, encodable characters, wrapping, and a progress line.

Models, config.json and other peers choose much of what is shown, and control characters of theirs
could write to the clipboard or disguise text: none gets past this file.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TextIO

from ...protocol.errors import UnavailableError

MAX_WIDTH = 80
"""Longer lines of text are harder to read."""

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FALLBACKS = str.maketrans("…→✓✗•─■·“”" + _SPINNER, '.>+x*-#.""' + "*" * len(_SPINNER))
"""One for one: a table stays as wide as it was."""

_TICK_SECONDS = 0.1

_CODE = f"\x1b{os.urandom(8).hex()}"
"""What `paint` begins a code with, for `clean` to know it: nobody else can guess it."""

_ERASE = "\x1b[K"
"""Erases what is behind the cursor."""

_CONTROLS = re.compile(f"{_CODE}|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All of C0 but tab and newline, DEL, and C1: terminals also obey escape sequences of 8 bits."""


def prepare_streams() -> None:
    """Keep control characters off stdout and stderr, and open /dev/null for streams not there.

    Where this process was started without one (`>&-`), Python has None in its place. Also, the next
    file or connection would get the descriptor of the stream, and the output that libraries and
    other processes write to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - it stays
        if mode == "w" and not isinstance(stream, CleanStream):
            stream = CleanStream(stream)
        setattr(sys, name, stream)


class CleanStream:
    """A standard stream without control characters, for what is not written through a `Terminal`.

    That is logs, warnings and tracebacks, whose messages may quote anybody. A progress bar of a
    library may still return to the beginning of its line.
    """

    def __init__(self, stream: TextIO) -> None:
        self.original = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def write(self, text: str) -> int:
        """Write the text without its control characters."""
        start = "\r" if text.startswith("\r") else ""
        with StatusLine.stepping_aside(self.original, text):
            self.original.write(start + clean(text))
        return len(text)


class Terminal:
    """A text stream with its width, colours and encoding.

    Colours only on a terminal and not under NO_COLOR (no-color.org); plain ASCII where the
    stream's encoding is not UTF-8. Control characters are left out, see `clean`.
    """

    def __init__(self, stream: TextIO | CleanStream) -> None:
        self.stream = stream.original if isinstance(stream, CleanStream) else stream
        self.is_terminal = stream.isatty()
        self.can_redraw = self.is_terminal and os.environ.get("TERM") != "dumb"
        """Whether a line can be drawn over."""
        self.has_colours = self.can_redraw and not os.environ.get("NO_COLOR")
        self._is_mid_line = False
        self._encoding = (getattr(stream, "encoding", None) or "ascii").lower()
        self._is_utf8 = self._encoding.replace("-", "").replace("_", "") == "utf8"

    @property
    def width(self) -> int:
        """Columns to use: those of the terminal, at most MAX_WIDTH."""
        columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns if self.is_terminal else 80
        return max(20, min(columns, MAX_WIDTH))

    def paint(self, text: str, *styles: str) -> str:
        """Return the text in the given styles, or as it is where there are no colours.

        It is for `write` and `print` of a terminal in this process.
        """
        if not self.has_colours or not text:
            return text
        codes = ";".join(_STYLES[style] for style in styles)
        return f"{_CODE}{codes}m{text}{_CODE}0m"

    def wrap(self, text: str) -> list[str]:
        """Return the lines of a sentence: as many as it needs on a terminal, elsewhere one.

        An address or a code stays whole, so that it can be copied.
        """
        if not self.is_terminal:
            return [text]
        return textwrap.wrap(
            text,
            self.width,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def encode(self, text: str) -> str:
        """Return the text in as many characters that the stream can take."""
        if self._is_utf8:
            return text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
        return text.translate(_FALLBACKS).encode(self._encoding, "replace").decode(self._encoding)

    def write(self, text: str) -> None:
        """Write and flush, so that text appears as it comes.

        Raises UnavailableError when the stream takes no more, such as a file on a full disk.
        """
        self._send(clean(text))

    def redraw(self, line: str) -> None:
        """Write from the beginning of the current line, over what stands there."""
        self._send(("\r" if self.can_redraw else "") + clean(line))

    def _send(self, text: str) -> None:
        if text:
            self._is_mid_line = not text.endswith("\n")
        try:
            with StatusLine.stepping_aside(self.stream, text):
                self.stream.write(self.encode(text))
                self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._is_mid_line = False
            discard_output(self.stream)
            raise UnavailableError(
                f"cannot write the output to {self.stream.name.strip('<>')}: {error.strerror}"
            ) from error

    @contextlib.contextmanager
    def ending_lines(self) -> Iterator[None]:
        """End a half-written line before an error or Ctrl-C goes on to say something."""
        try:
            yield
        except BaseException:
            if self._is_mid_line:
                self.print()
            raise

    def print(self, line: str = "") -> None:
        """Write one line."""
        self.write(line + "\n")

    def print_table(self, rows: Sequence[Sequence[str]]) -> None:
        """Write rows of cells in columns, the headings first.

        Of a table that is too wide, the last column gets lines of its own; the rest is cut.
        """
        columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
        is_wide = sum(columns) + 2 * len(columns) - 1 > self.width
        for number, row in enumerate(rows):
            *cells, last = (cell.ljust(width) for cell, width in zip(row, columns, strict=True))
            lines = [cells, [f"{' ' * columns[0]}  {last}"]] if is_wide else [[*cells, last]]
            for line in (f" {'  '.join(line)}".rstrip() for line in lines):
                if len(line) > self.width:
                    line = line[: self.width - 1] + "…"
                self.print(self.paint(line, "dim") if number == 0 else line)

    def print_json(self, value: object) -> None:
        """Write a value as one line of JSON, in ASCII without control characters."""
        self.print(json.dumps(value).replace("\x7f", "\\u007f"))

    def print_event(self, event: str, /, **facts: object) -> None:
        """Write an event as one line of JSON: an object with its name and its facts."""
        self.print_json({"event": event, **facts})


class StatusLine:
    """A line below all that this process prints on a terminal, in a `with` block; one at a time.

    Others print as if it was not there: it is erased before and drawn again behind whole lines.
    Nothing is shown where a line cannot be drawn over.
    """

    _shown: ClassVar["StatusLine | None"] = None

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._text = ""
        self._is_drawn = False
        self._is_mid_line = False  # what others print
        self._writing = threading.RLock()  # logs come from other threads

    def __enter__(self) -> "StatusLine":
        if self._terminal.can_redraw:
            StatusLine._shown = self
        return self

    def __exit__(self, *exception: object) -> None:
        with self._writing:
            self._erase()
            if StatusLine._shown is self:
                StatusLine._shown = None

    def show(self, text: str) -> None:
        """Show another text, as much of it as fits into the line; nothing for an empty one."""
        if StatusLine._shown is self:
            with self._writing:
                self._text = text
                self._draw()

    @classmethod
    @contextlib.contextmanager
    def stepping_aside(cls, stream: TextIO, text: str) -> Iterator[None]:
        """Make room while a text is written to a stream."""
        status = cls._shown
        if status is None or not text or not stream.isatty():
            yield
            return
        with status._writing:
            status._erase()
            yield
            status._is_mid_line = not text.endswith("\n")
            status._draw()

    def _draw(self) -> None:
        if self._is_mid_line or not (self._text or self._is_drawn):
            return
        columns = shutil.get_terminal_size().columns  # a person may make the window smaller
        line = self._terminal.encode(clean(self._text))[: columns - 1]
        self._write(f"\r{self._terminal.paint(line, 'dim')}{_ERASE}")
        self._is_drawn = line != ""

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(f"\r{_ERASE}")
            self._is_drawn = False

    def _write(self, text: str) -> None:
        """Write without a word where that is not possible: the next event says why."""
        with contextlib.suppress(OSError):
            self._terminal.stream.write(text.replace(_CODE, "\x1b["))
            self._terminal.stream.flush()


def clean(text: str) -> str:
    """Return a text without control characters but tabs, newlines and the codes of `paint`."""
    return _CONTROLS.sub(lambda found: "\x1b[" if found[0] == _CODE else "", text)


def discard_output(stream: TextIO) -> None:
    """Discard what is buffered and written from now on: nobody reads a stream any more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class WordWrapper:
    """Breaks text that arrives in pieces into lines, between words.

    A word is held back until it is complete, because its length decides its line.

    >>> wrapper = WordWrapper(10)
    >>> wrapper.feed("one two th") + wrapper.feed("ree four") + wrapper.flush()
    'one two\\nthree four'
    """

    def __init__(self, width: int, indent: str = "") -> None:
        self._width = width
        self._indent = indent
        self._column = 0
        self._spaces = ""
        self._word = ""

    @property
    def column(self) -> int:
        """The current column, indentation included; 0 at the beginning of a line."""
        return self._column

    def feed(self, text: str) -> str:
        """Take some text and return the part that can be shown now."""
        shown: list[str] = []
        for letter in text:
            if letter == "\n":
                shown += [self.flush(), "\n"]
                self._column, self._spaces = 0, ""
            elif letter.isspace():
                shown.append(self.flush())
                self._spaces += " "
            elif _columns(letter) == 2:
                # Scripts of wide letters do not separate words by spaces.
                shown.append(self.flush())
                self._word = letter
                shown.append(self.flush())
            else:
                self._word += letter
        return "".join(shown)

    def flush(self) -> str:
        """Return the word that was held back."""
        word, self._word = self._word, ""
        if not word:
            return ""
        spaces, self._spaces = self._spaces, ""
        num_columns = sum(map(_columns, word))
        if self._column and self._column + len(spaces) + num_columns > self._width:
            self._column, spaces = 0, ""
            lead = "\n" + self._indent
        else:
            lead = spaces if self._column else self._indent
        if not self._column:
            self._column = len(self._indent)
        self._column += len(spaces if lead == spaces else "") + num_columns
        return lead + word


def _columns(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


class Progress:
    """A status line that describes the work in progress and, if timed, counts its seconds."""

    def __init__(
        self, terminal: Terminal, describe: Callable[[], str], is_timed: bool = True
    ) -> None:
        self._line = StatusLine(terminal)
        self._describe = describe
        self._is_timed = is_timed
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._started_at = time.monotonic()

    def __enter__(self) -> "Progress":
        self._line.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._line.__exit__(*exception)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started_at

    def _draw(self) -> None:
        num_ticks = 0
        while not self._is_over.wait(_TICK_SECONDS):
            sign = _SPINNER[num_ticks % len(_SPINNER)]
            num_ticks += 1
            seconds = f"  {self.seconds:.0f} s" if self._is_timed else ""
            self._line.show(f"  {sign} {self._describe()}{seconds}")
