"""What `generate` says while it waits for its first token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from announcements import make_announcement

from shoal.cli.commands import generate
from shoal.client.routing.route import Hop
from shoal.client.session.state import StepProgress, Waiting
from shoal.protocol.spans import Span


@pytest.mark.parametrize(
    ("is_redrawn", "ends"), [(True, [", about 12 s", ", about 11 s"]), (False, ["", ""])]
)
def test_estimates_are_shown_only_on_a_line_that_is_redrawn(
    is_redrawn: bool, ends: list[str]
) -> None:
    hop = Hop(make_announcement(1), Span(0, 4))

    said = [
        generate._describe_start(
            SimpleNamespace(missing_blocks=[]),
            [SimpleNamespace(waiting=Waiting(hop, seconds))],
            False,
            20.0,
            is_redrawn,
        )
        for seconds in (12.0, 11.0)
    ]

    place = f"Waiting for room at peer …{hop.peer.peer_id[-6:]}"
    assert said == [place + end for end in ends]


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
    session = SimpleNamespace(waiting=None, progress=StepProgress(6000, num_done))

    line = generate._describe_start(
        SimpleNamespace(missing_blocks=[]), [session], False, 20.0, is_redrawn
    )

    assert line == said
