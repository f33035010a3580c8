"""What a run says fits into 80 columns, and a failure says how to see it again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from chaos.plan import CLIENTS, Action, Kind
from chaos.report import describe_failure, describe_outcome
from chaos.run import Outcome, Setting
from chaos.writers import Stall, Tally

from shoal.protocol.spans import Span

SETTING = Setting(31, 180.0, [Span(0, 4), Span(4, 8)] * 2, num_clients=5, weights="int8")


def make_outcome() -> Outcome:
    done = [Action(1.0, Kind.KILL, "P1"), Action(2.5, Kind.CUT, "P2", CLIENTS)]
    stall = Stall(3.21, 40, "client 2, star over P2 0:4\nat 60 P1, for it P2: " + "x" * 100)
    attacks = Counter({"tiny frames": 9, "handshakes": 37, "x" * 40: 1})
    return Outcome(SETTING, done, Tally(12, 3456, 7, 4, stall), attacks=attacks)


def test_summary_tells_what_was_done_in_80_columns() -> None:
    text = describe_outcome(make_outcome())

    assert "every answer is as if nothing had happened" in text
    assert "cut 1, drain 0, join 0, kill 1, pause 0, reset 0" in text
    assert "12, with 3456 tokens" in text
    assert "the stranger   handshakes 37, tiny frames 9," in text
    assert "3.2 s" in text
    assert "left out" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_failure_tells_the_plan_so_far_and_how_to_see_it_again() -> None:
    outcome = replace(make_outcome(), setting=replace(SETTING, kind="halves"), num_left_out=3)
    outcome.failures.append("token 5 is 1 instead of 2")

    summary, text = describe_outcome(outcome), describe_failure(outcome)

    assert "FAILED" in summary
    assert "  left out       3 actions: the swarm was not ready" in summary
    assert "2    2.5 s  cut    P2 from clients" in text
    assert "token 5 is 1 instead of 2" in text
    settings = "--peers 4 --replicas 2 --clients 5 --weights int8 --kind halves"
    assert text.endswith(f'make chaos SEED=31 SECONDS=180 ARGS="{settings}"')
