"""Half of a block's peers die at once, the other half stays, and as many come back."""

from __future__ import annotations

from itertools import groupby

import pytest
from chaos.halves import PERIOD_SECONDS, plan_halves
from chaos.plan import Action, Kind, name_peer

from shoal.protocol.spans import Span

SPANS = [Span(0, 4), Span(4, 8)] * 4
SEEDS = range(5)


def get_span(plan: list[Action], name: str) -> Span:
    first = {name_peer(number): span for number, span in enumerate(SPANS)}
    joined = {a.target: a.span for a in plan if a.kind is Kind.JOIN and a.span is not None}
    return {**first, **joined}[name]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_minute_half_of_the_hosts_of_a_block_are_killed(seed: int) -> None:
    plan = plan_halves(seed, 600, SPANS)
    kills = [action for action in plan if action.kind is Kind.KILL]

    rounds = [list(killed) for _, killed in groupby(kills, key=lambda action: action.at)]
    assert len(rounds) == 600 / PERIOD_SECONDS
    for killed in rounds:
        spans = [get_span(plan, action.target) for action in killed]
        assert len({action.target for action in killed}) == 2
        assert spans in ([SPANS[0]] * 2, [SPANS[1]] * 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_come_back_before_the_next_are_killed(seed: int) -> None:
    plan = plan_halves(seed, 600, SPANS)
    online = {name_peer(number) for number in range(len(SPANS))}
    for action in plan:
        match action.kind:
            case Kind.KILL:
                online.remove(action.target)
            case Kind.JOIN:
                assert action.other in online
            case Kind.ONLINE:
                online.add(action.target)
            case _:
                pytest.fail(f"{action} is not of this plan")
        spans = [get_span(plan, name) for name in online]
        assert min(sum(block in span for span in spans) for block in range(8)) >= 2
    assert len(online) == len(SPANS)


def test_a_block_keeps_its_only_host() -> None:
    assert plan_halves(0, 600, [Span(0, 4), Span(4, 8)]) == []


def test_plans_differ_by_seed() -> None:
    assert plan_halves(1, 600, SPANS) == plan_halves(1, 600, SPANS)
    assert plan_halves(1, 600, SPANS) != plan_halves(2, 600, SPANS)
