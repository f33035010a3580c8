"""What `generate` says while it waits for its first token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from announcements import make_announcement
from screens import Screen

from shoal.cli.commands import generate
from shoal.cli.remote_models import live_text
from shoal.cli.remote_models.opening import OpenedModel
from shoal.cli.remote_models.text_generation import Generation
from shoal.cli.terminal.terminal import Terminal
from shoal.client.routing.route import Hop
from shoal.client.session.state import StepProgress, Waiting
from shoal.protocol.spans import Span


def open_nothing() -> OpenedModel:
    model: Any = SimpleNamespace(missing_blocks=[])
    tokenizer: Any = None
    return OpenedModel(model, tokenizer, False, 20.0)


@pytest.mark.parametrize(
    ("is_redrawn", "ends"), [(True, [", about 12 s", ", about 11 s"]), (False, ["", ""])]
)
def test_estimates_are_shown_only_on_a_line_that_is_redrawn(
    is_redrawn: bool, ends: list[str]
) -> None:
    hop = Hop(make_announcement(1), Span(0, 4))

    sessions: list[Any] = [SimpleNamespace(waiting=Waiting(hop, s)) for s in (12.0, 11.0)]

    said = [
        live_text._describe_start(open_nothing(), [session], is_redrawn) for session in sessions
    ]

    place = f"Waiting for room at peer …{hop.peer.peer_id[-6:]}"
    assert said == [place + end for end in ends]


@pytest.mark.parametrize(
    ("stop", "is_terminal", "is_said"),
    [("END", True, True), ("END", False, False), ("", True, False)],
)
def test_people_are_told_at_which_stop_the_text_ended(
    stop: str, is_terminal: bool, is_said: bool
) -> None:
    screen = Screen(is_terminal=is_terminal)
    generation = Generation("a text", [1, 2], 1.0, 0.1, (), (), True, stop)

    generate._report(Terminal(screen), generation)

    assert ("Stopped before 'END'" in screen.text) is is_said


@pytest.mark.parametrize(
    ("num_done", "is_redrawn", "said"),
    [
        (0, True, ""),
        (2048, True, "Reading the prompt: 2,048 of 6,000 tokens"),
        (2048, False, ""),
    ],
)
def test_line_that_is_redrawn_shows_how_much_of_a_long_prompt_is_read(
    num_done: int, is_redrawn: bool, said: str
) -> None:
    session: Any = SimpleNamespace(waiting=None, progress=StepProgress(6000, num_done))

    line = live_text._describe_start(open_nothing(), [session], is_redrawn)

    assert line == said
