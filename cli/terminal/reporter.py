"""Reports what a command does: as text for people, or with --json as lines for programs."""

from collections.abc import Callable, Iterable

from .terminal import Progress, Terminal


class Reporter:
    """Prints the events of one command, each as its own lines of text or as one JSON object."""

    def __init__(self, output: Terminal, notices: Terminal, is_json: bool) -> None:
        self.output = output
        self.is_json = is_json
        self._notices = notices

    def showing(self, describe: Callable[[], str], is_timed: bool = True) -> Progress:
        """Return a progress line on `notices`, for a `with` block; see `Progress`."""
        return Progress(self._notices, describe, is_timed)

    def tell(self, event: str, lines: Iterable[str], /, **facts: object) -> None:
        """Print an event: its lines for people, or its name and facts as one JSON object."""
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
        for line in self._notices.wrap(f"{sentence[:1].upper()}{sentence[1:]}."):
            self._notices.print(self._notices.paint(line, "yellow"))
