"""Reports what a command does: as text for people, or with --json as lines for programs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from .terminal import Progress, Terminal


class Reporter:
    """Prints the events of one command, each as its own lines of text or as one JSON object.

    A progress line on `notices` makes room for them.
    """

    def __init__(self, output: Terminal, notices: Terminal, is_json: bool) -> None:
        self.output = output
        self.is_json = is_json
        self._notices = notices
        self._progress = Progress(notices, str)

    @contextlib.contextmanager
    def showing(self, describe: Callable[[], str], is_timed: bool = True) -> Iterator[None]:
        """Show a progress line while inside; see `Progress`."""
        self._progress = Progress(self._notices, describe, is_timed)
        with self._progress:
            yield

    def tell(self, event: str, lines: Iterable[str], /, **facts: object) -> None:
        """Print an event: its lines for people, or its name and facts as one JSON object."""
        with self._progress.making_room():
            if self.is_json:
                self.output.print_event(event, **facts)
            else:
                for line in lines:
                    self.output.print(line)

    def warn(self, sentence: str) -> None:
        """Print a warning: for people on `notices`, for programs as an event."""
        if self.is_json:
            self.tell("warning", (), text=sentence)
            return
        with self._progress.making_room():
            for line in self._notices.wrap(f"{sentence[:1].upper()}{sentence[1:]}."):
                self._notices.print(self._notices.paint(line, "yellow"))
