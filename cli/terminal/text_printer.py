"""How a text appears: as it comes, behind its prompt, and with what interrupts it."""

import threading

from .terminal import Terminal, WordWrapper


class TextPrinter:
    """Shows text as it comes: wrapped behind its prompt on a terminal, as it is in a pipe.

    With None for a terminal nothing is shown but interruptions.
    """

    def __init__(self, terminal: Terminal | None, notices: Terminal, prompt: str) -> None:
        self._terminal = terminal
        self._notices = notices
        is_for_people = terminal is not None and terminal.is_terminal
        self._wrapper = WordWrapper(terminal.width) if terminal and is_for_people else None
        self._prompt = prompt
        self._writing = threading.Lock()
        self.is_fresh = True
        """Whether no text has come yet."""

    def add(self, piece: str) -> None:
        """Show a piece of text, as far as its words are complete."""
        with self._writing:
            self._begin(piece)
            self._write(self._wrapper.feed(piece) if self._wrapper else piece)

    def interrupt(self, line: str) -> None:
        """Say something on a line of its own; the text goes on below. From any thread."""
        with self._writing:
            if self._wrapper and self._notices.is_terminal:
                self._write(self._wrapper.feed("\n"))
            self._notices.print(self._notices.paint(line, "dim"))

    def end(self) -> None:
        """Show what is left."""
        with self._writing:
            self._begin("")
            self._write((self._wrapper.flush() if self._wrapper else "") + "\n")

    def _begin(self, piece: str) -> None:
        """Repeat the prompt where a person reads along."""
        if self._terminal and self._wrapper and self.is_fresh:
            prompt = self._wrapper.feed(self._prompt)
            if not piece or piece[0].isspace():  # or its last word goes on
                prompt += self._wrapper.flush()
            self._write(self._terminal.paint(prompt, "dim"))
        self.is_fresh = False

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.write(text)
