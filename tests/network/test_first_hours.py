"""The first hours that docs/ tells of: typed as they are written, and what is shown compared."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import warm_python

pytestmark = [pytest.mark.network, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("first-hour-*.md"))
TIMEOUT_SECONDS = 120.0

PROGRAMS = {
    "shoal": [sys.executable, "-P", "-m", "shoal.cli"],
    "python": [sys.executable],
}
LASTING = ("shoal serve ", "shoal swarm ", "shoal publish ")
"""Commands that go on until Ctrl-C."""

PLACEHOLDERS = {"shoal:…": r"^shoal:\w+$", "/ip4/…": r"/ip4/[\w./]+"}
"""What a page writes in place of a code or an address, and what one looks like where printed."""


class Block(NamedTuple):
    """A fenced block: commands, the output of the last of them (`text`), or a file."""

    where: str
    kind: str
    text: str
    file: str
    """The last name in backticks before the block."""


def read_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S):
        where = f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}"
        names = re.findall(r"`([\w.-]+)`", text[: found.start()])
        yield Block(where, found[1], found[2], names[-1] if names else "")


def to_pattern(shown: str) -> re.Pattern[str]:
    """Return what matches a shown output: `…` is anything in a line or, alone, any lines.

    What stands there may be longer than on the page, and then a terminal breaks the line elsewhere.
    """
    lines = ("(.*\n)*" if line == "…" else _match_line(line) + "\n" for line in shown.splitlines())
    return re.compile("".join(lines))


def _match_line(line: str) -> str:
    escaped = re.escape(line)
    return escaped.replace("\\ ", r"\s+").replace("…", ".*") if "…" in line else escaped


_ERASE = "\x1b[K"
"""Erases the line from the cursor on."""


def read_screen(output: bytes) -> str:
    """Return what a terminal shows of an output, where lines are drawn over."""
    lines: list[str] = []
    for line in output.decode(errors="replace").split("\n"):
        shown = ""
        for drawn in line.split("\r"):
            cursor = 0
            for number, part in enumerate(drawn.split(_ERASE)):
                if number:
                    shown = shown[:cursor]
                shown = shown[:cursor] + part + shown[cursor + len(part) :]
                cursor += len(part)
        lines.append(shown.rstrip())
    return "\n".join(lines)


class Command:
    """A command in a terminal of its own, which is read all the time."""

    def __init__(self, line: str, folder: Path) -> None:
        self.line = line
        self._output = b""
        self._is_over = False
        self._news = threading.Condition()
        program, *words = shlex.split(line)
        master, slave = os.openpty()
        self.process = warm_python.Popen(
            [*PROGRAMS[program], *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            # A home without the swarms of other tests, which `shoal serve` would speak of.
            env=os.environ
            | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80", "HOME": str(folder)},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, args=[master], daemon=True)
        self._reader.start()

    @property
    def screen(self) -> str:
        return read_screen(self._output)

    def _read(self, master: int) -> None:
        with suppress(OSError):  # when nobody has the other end any more
            while piece := os.read(master, 4096):
                with self._news:
                    self._output += piece
                    self._news.notify()
        os.close(master)
        with self._news:
            self._is_over = True
            self._news.notify()

    def wait_until_shown(self, pattern: re.Pattern[str]) -> None:
        """Return when the output begins as it should."""
        with self._news:
            self._news.wait_for(
                lambda: self._is_over or pattern.match(self.screen), TIMEOUT_SECONDS
            )
            assert pattern.match(self.screen), f"{self.line}\n{self.screen}"

    def wait(self) -> None:
        """Return when it has ended well."""
        assert self.process.wait(TIMEOUT_SECONDS) == 0, f"{self.line}\n{self.screen}"
        self._reader.join(TIMEOUT_SECONDS)

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it in any case."""
        self.process.kill()
        self.process.wait()


class Newcomer:
    """Who follows a page from the top in one folder, with as many terminals as it takes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._lasting: list[Command] = []

    def follow(self, page: Path) -> None:
        """Do all that the page says, then press Ctrl-C everywhere."""
        last: Command | None = None
        for block in read_blocks(page):
            match block.kind:
                case "":
                    for line in block.text.replace("\\\n", "").splitlines():
                        last = self._type(line)
                case "text":
                    assert last is not None, f"{block.where}: the output of nothing"
                    self._compare(last, block)
                case _:
                    assert "." in block.file, f"{block.where} has no name to be saved under"
                    (self._folder / block.file).write_text(self._fill_in(block.text))
        for command in self._lasting:
            command.interrupt()
        for command in self._lasting:
            command.wait()

    def _type(self, line: str) -> Command:
        command = Command(self._fill_in(line), self._folder)
        self._stack.callback(command.kill)
        if line.startswith(LASTING):
            self._lasting.append(command)
        else:
            command.wait()
        return command

    def _compare(self, command: Command, block: Block) -> None:
        pattern = to_pattern(block.text)
        if command in self._lasting:
            command.wait_until_shown(pattern)
        else:
            assert pattern.fullmatch(command.screen), f"{block.where}\n{command.screen}"

    def _fill_in(self, text: str) -> str:
        """Write codes and addresses that were printed last where the page leaves them out."""
        for placeholder, pattern in PLACEHOLDERS.items():
            if placeholder in text:
                found = [re.findall(pattern, each.screen, flags=re.M) for each in self._lasting]
                text = text.replace(placeholder, next(filter(None, reversed(found)))[0])
        return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_says_what_a_newcomer_sees(page: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    with ExitStack() as stack:
        Newcomer(tmp_path, stack).follow(page)


def test_there_is_a_page_for_everybody() -> None:
    assert len(PAGES) == 4
