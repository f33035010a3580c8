"""Plans are made of seeds alone, keep every block served, and end as they began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from chaos.plan import CHOSEN, CLIENTS, Action, Kind, name_peer, plan_chaos

from shoal.protocol.spans import Span, find_gaps

SPANS = [Span(0, 3), Span(3, 6), Span(6, 8), *[Span(0, 4), Span(4, 8)] * 2]
NUM_BLOCKS = 8
SEEDS = range(10)


class World:
    """Everything that a plan has done so far, in the plainest way."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.span_of = {name_peer(number): span for number, span in enumerate(spans)}
        self.identity_of = {name: name for name in self.span_of}
        self.gone: set[str] = set()
        self.joining: set[str] = set()
        self.paused: set[str] = set()
        self.cut: set[tuple[str, str]] = set()

    def do(self, action: Action) -> None:
        name = action.target
        match action.kind:
            case Kind.KILL | Kind.DRAIN:
                self.gone.add(name)
            case Kind.PAUSE:
                self.paused.add(name)
            case Kind.RESUME:
                self.paused.remove(name)
            case Kind.CUT:
                self.cut.add((name, action.other))
            case Kind.HEAL:
                self.cut.remove((name, action.other))
            case Kind.JOIN:
                assert action.span is not None
                self.span_of[name] = action.span
                self.identity_of[name] = action.identity_of
                self.joining.add(name)
            case Kind.ONLINE:
                self.joining.remove(name)
            case Kind.RESET:
                pass

    @property
    def running(self) -> list[str]:
        return [name for name in self.span_of if name not in self.gone]

    @property
    def sound(self) -> list[str]:
        from_clients = {name for name, other in self.cut if other == CLIENTS}
        away = self.joining | self.paused | from_clients
        return [name for name in self.running if name not in away]


def test_plan_follows_from_its_seed() -> None:
    plans = [plan_chaos(seed, 60, SPANS) for seed in SEEDS]

    assert plans == [plan_chaos(seed, 60, SPANS) for seed in SEEDS]
    assert len({str(plan) for plan in plans}) == len(plans)


def test_longer_plan_begins_like_a_shorter_one() -> None:
    short, long = plan_chaos(7, 30, SPANS), plan_chaos(7, 90, SPANS)

    begun = [action for action in short if action.begun_at is None]
    assert begun == [action for action in long if action.begun_at is None][: len(begun)]


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_keeps_a_sound_peer_on_every_block_and_mends_all_else(seed: int) -> None:
    plan, gone, world = plan_chaos(seed, 300, SPANS), set[str](), World(SPANS)
    assert [action.at for action in plan] == sorted(action.at for action in plan)

    for action in plan:
        world.do(action)
        gaps = find_gaps(NUM_BLOCKS, [world.span_of[name] for name in world.sound])
        assert not gaps, f"{action} leaves blocks to nobody"
        if action.begun_at is None:  # a link may heal whose peer was killed meanwhile
            assert not {action.target, action.other} & gone, str(action)
        gone = set(world.gone)

    assert not world.paused | world.joining | world.cut


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_starts_peers_with_identities_that_are_free_through_peers_that_stay(seed: int) -> None:
    through, world = dict[str, str](), World(SPANS)
    for action in plan_chaos(seed, 300, SPANS):
        world.do(action)
        identities = [world.identity_of[name] for name in world.running]
        if action.kind is Kind.JOIN:
            through[action.target] = action.other
        elif action.kind is Kind.ONLINE:
            del through[action.target]
        assert max(Counter(identities).values()) == 1, str(action)
        assert set(through.values()) <= set(world.sound), str(action)


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_of_a_minute_does_everything(seed: int) -> None:
    plan = plan_chaos(seed, 60, SPANS)

    assert {action.kind for action in plan} == set(Kind)
    assert set(CHOSEN) == {action.kind for action in plan if action.begun_at is None}


def test_plans_cut_links_to_clients_and_between_peers() -> None:
    plans = [plan_chaos(seed, 60, SPANS) for seed in SEEDS]
    cuts = [action for plan in plans for action in plan if action.kind is Kind.CUT]

    assert len([action for action in cuts if action.other == CLIENTS]) > len(cuts) / 4
    assert len([action for action in cuts if action.other != CLIENTS]) > len(cuts) / 4


def test_bootstrap_peer_is_lost_and_others_join_afterwards() -> None:
    lost = 0
    for seed in SEEDS:
        plan = plan_chaos(seed, 120, SPANS)
        ends = [a.at for a in plan if a.target == "P1" and a.kind in (Kind.KILL, Kind.DRAIN)]
        lost += any(action.kind is Kind.JOIN and action.at > end for end in ends for action in plan)

    assert lost > len(SEEDS) / 2
