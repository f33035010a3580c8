"""Streams of text that say what they are."""

from __future__ import annotations

import io


class Screen(io.TextIOWrapper):
    """A text stream in memory that says it is a terminal, or not."""

    def __init__(self, encoding: str = "utf-8", is_terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)
