"""A text that a swarm generates, shown as it comes: shared by `generate` and `chat`.

Imports nothing heavy.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...protocol.spans import Span
from ..terminal.terminal import Terminal
from ..terminal.text_printer import ChangeNotices, TextPrinter, show_waiting

if TYPE_CHECKING:
    from ...client.session.inference_session import InferenceSession

_T = TypeVar("_T")

OnToken = Callable[[str], None]
"""Called for every new token with the text that it completes, often empty or half a word."""

OnSession = Callable[["InferenceSession"], None]
"""Called with the session of a text before the first token."""


class AwaitedModel(Protocol):
    """The part of a model that `show_text` reads while it waits for the first token."""

    @property
    def missing_blocks(self) -> Sequence[Span]:
        """The blocks that nobody serves."""
        ...


class Awaited(Protocol):
    """The part of an `OpenedModel` that `show_text` reads while it waits for the first token."""

    @property
    def model(self) -> AwaitedModel: ...
    @property
    def has_published_adapter(self) -> bool: ...
    @property
    def wait_seconds(self) -> float: ...


def show_text(
    opened: Awaited,
    printer: TextPrinter,
    notices: Terminal,
    generate: Callable[[OnToken, OnSession], _T],
    on_start: OnSession = lambda session: None,
) -> _T:
    """Generate a text and print it as it comes, and what it waits for.

    `on_start` gets the session when the first token is there.
    """
    sessions: list[InferenceSession] = []

    def describe_start() -> str:
        return _describe_start(opened, sessions, notices.can_redraw)

    def describe_outage() -> str:
        sought = None if printer.is_fresh else sessions[0].sought
        return _describe_wait([sought], opened.wait_seconds) if sought else ""

    with contextlib.ExitStack() as waiting:
        waiting.enter_context(show_waiting(notices, describe_start, "Generating"))

        def on_token(piece: str) -> None:
            if printer.is_fresh:
                waiting.close()
                on_start(sessions[0])
            printer.add(piece)

        with ChangeNotices(describe_outage, printer.interrupt):
            generated = generate(on_token, sessions.append)
        printer.end()
    return generated


def _describe_start(
    opened: Awaited, sessions: Sequence["InferenceSession"], is_redrawn: bool
) -> str:
    """Return what the first token waits for, as far as that is known.

    Estimates, which change every second, are only for a line that is redrawn.
    """
    if sessions and (waiting := sessions[0].waiting):
        return f"Waiting for {waiting if is_redrawn else waiting.place}"
    model, seconds = opened.model, opened.wait_seconds
    if (
        opened.has_published_adapter
        and not model.missing_blocks
        and not (sessions and sessions[0].hops)
    ):
        return "Waiting for peers to fetch the adapter"
    if missing := _describe_wait(model.missing_blocks, seconds):
        return missing
    progress = sessions[0].progress if sessions and is_redrawn else None
    if progress is None or progress.num_done == 0:  # or the prompt is one piece
        return ""
    return f"Reading the prompt: {progress.num_done:,} of {progress.num_tokens:,} tokens"


def _describe_wait(missing: Sequence[Span], seconds: float) -> str:
    """Return the missing blocks for which no token comes; nothing where none is missing.

    >>> _describe_wait([Span(0, 4)], 20.0)
    'Waiting for blocks 0:4, at most 20 s'
    >>> _describe_wait([Span(0, 4)], 0.0)
    'No peer serves blocks 0:4'
    """
    names = ", ".join(map(str, missing))
    if not names:
        return ""
    if seconds == 0:
        return f"No peer serves blocks {names}"
    return f"Waiting for blocks {names}, at most {seconds:g} s"
