"""Chains into peers that cannot be dialled: whoever pushes there does it over a parked stream.

On virtual time a token tells by how long it takes which way it went, and what comes out is what a
chain of peers that can be dialled makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from chosen_cases import choose_cases
from story_outputs import assert_same
from torch import Tensor
from virtual_route import LINK, RouteWorld, delay_steps, run
from virtual_swarm import draw
from virtual_time import VirtualClock

from shoal.client.session.session import RemoteSession

NUM_TOKENS = 40
CHAIN_SECONDS = 4 * LINK.delay_seconds
"""Of a token that every hop pushes to the next."""

BRIDGE_SECONDS = 5 * LINK.delay_seconds
"""Of one that passes by the client between two hops."""

STEP_SECONDS = 0.004


class Text:
    """Tokens that a session is given one by one, and what comes of them."""

    def __init__(self, world: RouteWorld, session: RemoteSession | None = None) -> None:
        self.outputs: list[Tensor] = []
        self._session = session or world.session

    async def go_on(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            token = draw(len(self.outputs), 1)
            self.outputs.append(await self._session.step(token, is_decoded=True))

    async def time_token(self) -> float:
        asked_at = VirtualClock().now()
        await self.go_on(1)
        return VirtualClock().now() - asked_at


Story = Callable[[RouteWorld, Text], Awaitable[None]]


def tell(tiny_models: Any, story: Story, relayed: tuple[int, ...] = (1,), **settings: Any) -> None:
    """Run a story, then bring its text to an end, which has to be as if nothing had happened."""
    texts: list[Text] = []

    async def tell_undisturbed(world: RouteWorld) -> None:
        texts.append(Text(world))
        await texts[-1].go_on(NUM_TOKENS)

    async def tell_story(world: RouteWorld) -> None:
        texts.append(Text(world))
        await story(world, texts[-1])
        await texts[-1].go_on(NUM_TOKENS - len(texts[-1].outputs))

    directory = tiny_models.get().directory
    run(directory, tell_undisturbed)
    run(directory, tell_story, relayed=relayed, **settings)
    expected, got = (text.outputs for text in texts)
    assert_same(got, expected)


@pytest.mark.parametrize("relayed", [(1,), (0, 2)])
def test_every_hop_pushes_to_the_next(tiny_models: Any, relayed: tuple[int, ...]) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)

        assert await text.time_token() == pytest.approx(CHAIN_SECONDS)
        assert world.session.failovers == []

    tell(tiny_models, story, relayed)


def test_two_that_cannot_be_dialled_have_the_client_between_them(tiny_models: Any) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)

        assert await text.time_token() == pytest.approx(BRIDGE_SECONDS)
        assert world.session.failovers == []

    tell(tiny_models, story, (1, 2))


@pytest.mark.parametrize(
    ("relayed", "index"),
    choose_cases([((1,), 0), ((1,), 1), ((2,), 1), ((2,), 2)], [(1,), (2,)], range(3)),
)
def test_hop_that_leaves_hands_over_without_a_failover(
    tiny_models: Any, relayed: tuple[int, ...], index: int
) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        for service in world.services.values():
            delay_steps(service, STEP_SECONDS)
        await text.go_on(5)

        world.services[world.host_of(index)].begin_draining()
        await text.go_on(20)

        assert len(world.session.handoffs) == 1
        assert world.session.failovers == []
        expected_seconds = CHAIN_SECONDS + 3 * STEP_SECONDS
        assert await text.time_token() == pytest.approx(expected_seconds)

    tell(tiny_models, story, relayed)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hop_that_is_killed_is_replaced_in_the_chain(tiny_models: Any, index: int) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)

        world.network.kill(world.host_of(index))
        await text.go_on(5)

        assert len(world.session.failovers) == 1
        assert await text.time_token() == pytest.approx(CHAIN_SECONDS)

    tell(tiny_models, story)


@pytest.mark.parametrize("index", choose_cases([(1,)], range(3)))
def test_standby_behind_a_nat_takes_over(tiny_models: Any, index: int) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)
        async with asyncio.timeout(30):
            while len(world.session.standbys) < 3:  # noqa: ASYNC110 - it happens behind the steps
                await asyncio.sleep(0.01)

        world.network.kill(world.host_of(index))
        await text.go_on(5)

        (failover,) = world.session.failovers
        assert failover.num_replayed_tokens == 0
        assert await text.time_token() == pytest.approx(CHAIN_SECONDS)

    tell(tiny_models, story, standby=True)


def test_fork_is_pushed_over_the_same_stream(tiny_models: Any) -> None:
    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)
        twin = await world.open_session()
        await world.session.fork_into(twin, world.session.position)

        text_of_twin = Text(world, twin)
        await text_of_twin.go_on(1)
        seconds = await text_of_twin.time_token()
        await twin.close()

        assert seconds == pytest.approx(CHAIN_SECONDS)
        assert twin.failovers == []

    tell(tiny_models, story)


def test_stream_that_has_vanished_when_it_is_needed_costs_the_way_by_the_client(
    tiny_models: Any,
) -> None:
    """Both ends live, so nobody is lost: the client carries what passes there."""

    async def story(world: RouteWorld, text: Text) -> None:
        await text.go_on(5)
        before, behind = world.host_of(0), world.host_of(1)
        for number in (0, 1):
            world.network.partition(f"peer{number}", behind)

        await asyncio.sleep(30)
        await text.go_on(5)

        assert world.session.failovers == []
        assert (world.host_of(0), world.host_of(1)) == (before, behind)
        assert await text.time_token() == pytest.approx(BRIDGE_SECONDS)

    tell(tiny_models, story)
