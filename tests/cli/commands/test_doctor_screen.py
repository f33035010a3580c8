"""What doctor shows on terminals of every width."""

from __future__ import annotations

import io

import pytest

from shoal.cli.commands.doctor import _Screen  # pyright: ignore[reportPrivateUsage]
from shoal.cli.terminal.terminal import Terminal
from shoal.client.doctor.finding import Finding, FindingStatus


class NarrowTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [1, 20, 21, 40, 80])
def test_findings_are_shown_whole_on_every_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = NarrowTerminal()

    screen = _Screen(Terminal(stream))
    screen.show_finding(
        Finding("peers", FindingStatus.BROKEN, "nobody is there", "start two of them")
    )

    words = stream.getvalue().split()
    assert words == ["✗", "peers", *"nobody is there".split(), "→", *"start two of them".split()]
