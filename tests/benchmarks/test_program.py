"""Programs of benchmarks: how they end, and how one that measures a single thing says so."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable

import pytest

from measuring.program import measure_one, run_program
from shoal.cli.benchmarking.figure import Figure
from shoal.cli.terminal.interrupts import INTERRUPTED
from shoal.protocol.errors import UnavailableError


def fail() -> None:
    raise UnavailableError("the page was not updated")


def end_by_signal() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (lambda: 3, 3),
        (lambda: None, None),
        (fail, "make bench: the page was not updated"),
        (end_by_signal, INTERRUPTED),
    ],
    ids=["code", "no code", "error", "SIGTERM"],
)
def test_program_ends_with_what_became_of_it(
    main: Callable[[], int | None], code: int | str | None
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_program(main)

    assert ended.value.code == code


def test_one_measurement_is_reported_by_the_options_that_it_got(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["page", "--peers", "7", "--json"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=300)

    code = measure_one(
        "page", "{peers} peers", parser, lambda options, say: [Figure("peers", options.peers, "")]
    )

    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert (code, part["title"], part["figures"][0]["value"]) == (0, "7 peers", 7)
