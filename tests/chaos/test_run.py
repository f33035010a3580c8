"""A short chaos on real processes, from the start of the swarm to what is left behind."""

from __future__ import annotations

import pytest
from chaos.report import describe_failure, describe_outcome
from chaos.run import Setting, run_chaos

from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = [Span(0, 4), Span(4, 8)] * 2
SEED = 471
"""Its twelve seconds have everything: the first peer is killed, and another takes its place."""


def test_every_answer_of_a_short_chaos_is_as_undisturbed() -> None:
    setting = Setting(SEED, seconds=12.5, spans=SPANS, num_clients=3)
    outcome = run_chaos(setting, print)

    assert not outcome.failures, describe_failure(outcome)
    assert outcome.tally.num_texts > 0
    assert len(outcome.done) > 5
    assert len(outcome.done) + outcome.num_left_out == len(setting.plan())
    assert all(len(line) <= 80 for line in describe_outcome(outcome).splitlines())
