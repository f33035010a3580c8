"""Chaos on real processes, from the start of a swarm to what is left behind."""

from __future__ import annotations

import pytest
import warm_python
from chaos.plan import Kind
from chaos.report import describe_failure, describe_outcome
from chaos.run import Setting, run_chaos

from shoal.protocol.spans import Span
from swarm_benchmarks.attacker import ATTACKS

pytestmark = [pytest.mark.network, pytest.mark.slow]

SPANS = [Span(0, 4), Span(4, 8)] * 2
SEED = 16732
"""It kills the first peer first, and another takes its place. Within a quarter of a minute it does
everything that can be done, to clients as well as between peers."""

TOKEN_SECONDS = 0.03
"""Clients that read as they go hold their sessions as long, and leave a core to other tests."""


@pytest.mark.parametrize("seconds", [25.0, pytest.param(180.0, marks=pytest.mark.thorough)])
def test_every_answer_in_chaos_is_as_undisturbed(seconds: float) -> None:
    setting = Setting(SEED, seconds, SPANS, num_clients=3, token_seconds=TOKEN_SECONDS)
    warm_python.forge.start()  # it was there before, and stays
    outcome = run_chaos(setting, print)

    assert not outcome.failures, describe_failure(outcome)
    assert outcome.tally.num_texts > 0
    assert {action.kind for action in outcome.done} == set(Kind)
    assert outcome.attacks.keys() >= {"false announcements", "false peers were dialled", *ATTACKS}
    assert all(outcome.attacks.values()), outcome.attacks
    assert len(outcome.done) + outcome.num_left_out == len(setting.plan())
    assert all(len(line) <= 80 for line in describe_outcome(outcome).splitlines())
