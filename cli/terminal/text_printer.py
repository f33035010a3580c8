"""Streams a text to a terminal behind its prompt, and says what it waits for."""

import threading
from collections.abc import Callable

from .terminal import Progress, Terminal, WordWrapper

_PATIENCE_SECONDS = 1.0
"""Most failovers are over by then, and the report at the end names them."""

_LOOK_SECONDS = 0.1


class TextPrinter:
    """Prints text as it arrives: wrapped behind its prompt on a terminal, unchanged in a pipe.

    With None for a terminal it prints only interruptions.
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
        """Print a line of its own; the text continues below it. From any thread."""
        with self._writing:
            if self._wrapper and self._notices.is_terminal:
                self._write(self._wrapper.feed("\n"))
            self._notices.print(self._notices.paint(line, "dim"))

    def end(self) -> None:
        """Print the rest of the text."""
        with self._writing:
            self._begin("")
            self._write((self._wrapper.flush() if self._wrapper else "") + "\n")

    def _begin(self, piece: str) -> None:
        """Print the prompt first, on a terminal."""
        if self._terminal and self._wrapper and self.is_fresh:
            prompt = self._wrapper.feed(self._prompt)
            if not piece or piece[0].isspace():  # otherwise its last word continues
                prompt += self._wrapper.flush()
            self._write(self._terminal.paint(prompt, "dim"))
        self.is_fresh = False

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.write(text)


class ChangeNotices:
    """Tells what is waited for each time that it changes, in a thread during a `with` block.

    `describe` returns it in words, or an empty string for nothing; `notify` is called once with
    words that have stayed the same for so long.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        notify: Callable[[str], None],
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._describe = describe
        self._notify = notify
        self._num_patient_looks = round(patience_seconds / _LOOK_SECONDS)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "ChangeNotices":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        known, num_looks, is_over = "", 0, False
        while not is_over:
            found = self._describe()
            num_looks = num_looks + 1 if found == known else 0
            known = found
            if found and num_looks == self._num_patient_looks:
                self._notify(found)
            is_over = self._is_over.wait(_LOOK_SECONDS)


def show_waiting(
    notices: Terminal, describe: Callable[[], str], otherwise: str = ""
) -> Progress | ChangeNotices:
    """Return a context that shows what is waited for, or `otherwise` on a terminal.

    On a terminal it is a progress line; elsewhere, such as in a file, a line for each change.
    """
    if notices.can_redraw:
        return Progress(notices, lambda: describe() or otherwise)
    return ChangeNotices(describe, notices.print, patience_seconds=0.0)
