"""Hops of a chain that stand still, and others that are only slow, on virtual time.

Virtual, so that what is measured is the client's own patience and no machine's speed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_route import SPANS, RouteWorld, delay_steps, run
from virtual_swarm import HIDDEN, draw
from virtual_time import VirtualClock

from shoal.protocol.net.memory.loopback import Link

NOTICED_SECONDS = 2.0
SHORT_OF_THE_FLOOR = 0.9
"""A busy machine has a peer stand still for so long; it is not to be replaced for that."""


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_stands_still_is_replaced_in_less_than_two_seconds(
    tiny_models: Any, index: int
) -> None:
    async def story(world: RouteWorld) -> None:
        await world.generate(3)
        host = world.host_of(index)

        world.network.pause(host)
        seconds = await world.time_token()

        assert SHORT_OF_THE_FLOOR < seconds < NOTICED_SECONDS
        (failover,) = world.session.failovers
        assert failover.lost.span == SPANS[index]
        assert world.host_of(index) != host

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_time_that_a_failover_took_is_no_hops_own(tiny_models: Any, index: int) -> None:
    """Or else the hops that are left would be given many times as long from then on."""

    async def story(world: RouteWorld) -> None:
        await world.generate(3)
        world.network.pause(world.host_of((index + 1) % 3))
        await world.generate(3)

        world.network.pause(world.host_of(index))
        seconds = await world.time_token()

        assert seconds < NOTICED_SECONDS
        assert len(world.session.failovers) == 2

    run(tiny_models.get().directory, story)


def test_time_that_a_piece_of_a_prompt_stood_behind_others_is_not_its_own(tiny_models: Any) -> None:
    """Its last piece is short: or else tokens were thought to take as long as the whole prompt."""

    async def story(world: RouteWorld) -> None:
        for service in world.services.values():
            delay_steps(service, 0.03)
        await world.session.step(draw(1, 3 * 128 + 5))

        world.network.pause(world.host_of(1))
        seconds = await world.time_token()

        assert SHORT_OF_THE_FLOOR < seconds < NOTICED_SECONDS

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_stands_still_for_a_moment_is_kept(tiny_models: Any, index: int) -> None:
    async def story(world: RouteWorld) -> None:
        await world.generate(3)
        host = world.host_of(index)

        for _ in range(3):
            world.network.pause(host)
            loop = asyncio.get_running_loop()
            loop.call_later(SHORT_OF_THE_FLOOR, world.network.resume, host)
            assert await world.time_token() >= SHORT_OF_THE_FLOOR

        assert world.session.failovers == []
        assert world.host_of(index) == host

    run(tiny_models.get().directory, story)


@pytest.mark.parametrize("delivery", ["star", "chain"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_lives_and_computes_is_given_its_whole_time(
    tiny_models: Any, index: int, delivery: str
) -> None:
    """A chain is as patient as a star: being asked how far it is costs a slow hop nothing."""

    async def story(world: RouteWorld) -> None:
        await world.generate(3)

        delay_steps(world.services[world.host_of(index)], SHORT_OF_THE_FLOOR)
        await world.generate(3)

        assert world.session.failovers == []

    run(tiny_models.get().directory, story, delivery)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_client_that_stood_still_itself_blames_nobody(tiny_models: Any, index: int) -> None:
    async def story(world: RouteWorld) -> None:
        await world.generate(3)
        loop = asyncio.get_running_loop()

        for seconds in (0.05, 0.3, 1.05):  # before it asks, while it asks, and behind
            world.network.pause(world.host_of(index))
            loop.call_later(seconds, VirtualClock().stall, 5.0)
            loop.call_later(seconds, world.network.resume, world.host_of(index))
            await world.time_token()

        assert world.session.failovers == []

    run(tiny_models.get().directory, story)


def test_step_that_slow_links_carry_is_not_taken_for_lost(tiny_models: Any) -> None:
    """Hops that live are given the time that bytes need between them, as far as is known."""

    async def story(world: RouteWorld) -> None:
        await world.generate(3)
        links: Any = world.session.state.book.links
        slow = Link(delay_seconds=0.002, bandwidth_bytes_per_second=1024)
        for index in (0, 1):
            before, after = world.session.hops[index : index + 2]
            world.network.set_link(world.host_of(index), world.host_of(index + 1), slow)
            links.note_answer([before.peer.peer_id, after.peer.peer_id], 2**17, 128.0)

        asked_at = VirtualClock().now()
        await world.session.step(draw(1, 20))

        assert VirtualClock().now() - asked_at > 2 * 20 * HIDDEN * 4 / 1024
        assert world.session.failovers == []
        assert links.broken == frozenset()

    run(tiny_models.get().directory, story)
