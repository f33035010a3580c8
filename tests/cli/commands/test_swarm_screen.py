"""What `shoal swarm` says when a peer of it ends; test_swarm_commands.py ends one for real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from screens import Screen

from shoal.cli.commands.swarm import _estimate_speed, _report_ended
from shoal.cli.terminal.reporter import Reporter
from shoal.cli.terminal.terminal import Terminal
from shoal.protocol.spans import Span

ENDED: Any = SimpleNamespace(peer_id="12D3KooW", span=Span(4, 8), pid=1, wait=lambda _: -9)


def tell(missing: list[Span], addresses: list[str]) -> str:
    screen = Screen(is_terminal=False)
    reporter = Reporter(Terminal(screen), Terminal(screen), False)
    _report_ended(reporter, ENDED, missing, addresses, "my model")
    return screen.text


def test_blocks_that_a_joined_peer_may_serve_need_no_new_swarm() -> None:
    said = tell([Span(4, 6), Span(7, 8)], ["/ip4/a", "/ip4/b"])

    assert "Unless a peer that has joined does" in said
    for blocks in ("4:6", "7:8"):
        command = f"shoal serve 'my model' --blocks {blocks} --initial-peers /ip4/a"
        assert f"    {command}" in said.splitlines()
    assert "start the swarm again" not in said


@pytest.mark.parametrize("missing", [[], [Span(4, 8)]])
def test_swarm_without_addresses_gives_no_advice(missing: list[Span]) -> None:
    assert "--initial-peers" not in tell(missing, [])


def test_speed_of_a_text_is_that_of_a_step_at_every_span() -> None:
    peers: list[Any] = [
        SimpleNamespace(span=span, facts={"decode_steps_per_second": speed})
        for span, speed in ((Span(0, 4), 100.0), (Span(0, 4), 200.0), (Span(4, 8), 50.0))
    ]

    assert _estimate_speed(peers) == pytest.approx(40.0)
