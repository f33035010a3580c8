"""How long a session is held up by a peer that leaves, on virtual time: hardly at all."""

from __future__ import annotations

from typing import Any

import pytest
from chosen_cases import choose_cases
from virtual_route import SPANS, RouteWorld, delay_steps, run
from virtual_time import VirtualClock

STEP_SECONDS = 0.004
"""What computing takes at each hop: replays as well, so that tokens go on meanwhile."""
MOST_STEPS = 3.0
"""For so many normal steps a session may be held up."""
SOON_SECONDS = 1.0


@pytest.mark.parametrize("delivery", ["star", "chain"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_nobody_waits_for_a_hop_that_moves(tiny_models: Any, delivery: str, index: int) -> None:
    async def story(world: RouteWorld) -> None:
        for service in world.services.values():
            delay_steps(service, STEP_SECONDS)
        await world.generate(10)
        normal_seconds = max([await world.time_token() for _ in range(5)])
        leaving = world.services[world.host_of(index)]

        leaving.begin_draining()
        left_at = VirtualClock().now()
        seconds = [await world.time_token() for _ in range(15)]

        (handoff,) = world.session.handoffs
        assert handoff.left.span == SPANS[index]
        assert handoff.stall_seconds <= normal_seconds
        assert max(seconds) <= MOST_STEPS * normal_seconds
        assert len([each for each in seconds if each > 1.01 * normal_seconds]) <= 3
        assert world.session.failovers == []
        assert await leaving.wait_until_empty(SOON_SECONDS)
        assert VirtualClock().now() - left_at < SOON_SECONDS

    run(tiny_models.get().directory, story, delivery)


@pytest.mark.parametrize("delivery", ["star", "chain"])
def test_nobody_waits_when_all_hops_move(tiny_models: Any, delivery: str) -> None:
    async def story(world: RouteWorld) -> None:
        for service in world.services.values():
            delay_steps(service, STEP_SECONDS)
        await world.generate(5)
        normal_seconds = max([await world.time_token() for _ in range(5)])

        for index in range(3):
            world.services[world.host_of(index)].begin_draining()
        seconds = [await world.time_token() for _ in range(40)]

        assert len(world.session.handoffs) == 3
        assert max(seconds) <= MOST_STEPS * normal_seconds
        assert world.session.failovers == []

    run(tiny_models.get().directory, story, delivery)


@pytest.mark.parametrize(
    ("delivery", "index", "slowness"),
    choose_cases(
        [("star", 0, 2), ("star", 1, 25), ("chain", 0, 25), ("chain", 1, 2), ("chain", 2, 25)],
        ["star", "chain"],
        [0, 1, 2],
        [2, 25],
    ),
)
def test_nobody_waits_for_a_slow_peer_to_catch_up(
    tiny_models: Any, delivery: str, index: int, slowness: int
) -> None:
    """One that is slower than the whole route never does, as long as tokens go on."""

    async def story(world: RouteWorld) -> None:
        used = {world.host_of(each) for each in range(3)}
        for host, service in world.services.items():
            delay_steps(service, STEP_SECONDS * (1 if host in used else slowness))
        await world.generate(5)
        normal_seconds = max([await world.time_token() for _ in range(5)])

        world.services[world.host_of(index)].begin_draining()
        seconds = [await world.time_token() for _ in range(30)]

        assert len(world.session.handoffs) == (slowness == 2)
        assert max(seconds) <= MOST_STEPS * normal_seconds
        assert world.session.failovers == []

    run(tiny_models.get().directory, story, delivery)
