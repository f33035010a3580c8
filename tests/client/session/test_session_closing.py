"""A session that is closed, from another thread, while a step is under way."""

from __future__ import annotations

import asyncio

import pytest
import torch
from session_scene import Oracle, SessionScene, add_two_rows_of_peers, draw, in_scene

from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.client import Client
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.errors import UsageError
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.spans import Span

SLOW = Link(delay_seconds=0.05)


# Opening takes two round trips of 0.1 s, and a step one for each of three hops.
@pytest.mark.parametrize("row_map", [None, (1, 0)], ids=["plain", "rows"])
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.12, 0.22, 0.27, 0.32, 0.42])
@in_scene(SLOW)
async def test_closing_ends_the_step_under_way_and_nobody_is_blamed(
    scene: SessionScene, seconds: float, row_map: tuple[int, ...] | None
) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    step = asyncio.create_task(session.step(draw(1, 3, num_rows=2), row_map))
    await asyncio.sleep(seconds)

    await session.close()

    with pytest.raises(UsageError, match="closed"):
        await step
    assert session.hops == ()
    assert scene.quarantined == []
    await asyncio.sleep(1)
    assert [name for name, peer in scene.peers.items() if peer.caches] == []


@in_scene(SLOW)
async def test_closing_during_a_failover_leaves_nothing_anywhere(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))
    lost = scene.peer_of(session, 1)
    scene.network.kill(lost.name)
    step = asyncio.create_task(session.step(draw(2)))
    await asyncio.sleep(0.25)

    await asyncio.gather(session.close(), session.close())

    with pytest.raises(UsageError, match="closed"):
        await step
    assert scene.quarantined == [lost.name]
    await asyncio.sleep(1)
    assert [n for n, peer in scene.peers.items() if peer.caches and peer is not lost] == []
    lost.caches.clear()


@in_scene(SLOW)
async def test_step_that_waits_for_its_turn_hears_that_the_session_was_closed(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    steps = [asyncio.create_task(session.step(draw(1))) for _ in range(2)]
    await asyncio.sleep(0.1)

    await session.close()

    for result in await asyncio.gather(*steps, return_exceptions=True):
        assert isinstance(result, UsageError), result


@in_scene(SLOW)
async def test_caller_that_is_cancelled_stays_cancelled_when_the_session_is_closed_too(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    step = asyncio.create_task(session.step(draw(1)))
    await asyncio.sleep(0.25)

    step.cancel()
    await session.close()
    await asyncio.wait([step])

    assert step.cancelled()


@in_scene(SLOW)
async def test_closing_one_session_does_not_touch_another_on_the_same_peers(
    scene: SessionScene,
) -> None:
    for name, start, stop in (("a", 0, 3), ("b", 3, 6)):
        await scene.add(name, start, stop)
    mine, oracle = scene.open_session(), Oracle()
    other = scene.open_session(secret=SessionId(b"another secret.."))
    assert torch.equal(await mine.step(draw(1)), oracle.step(draw(1)))
    step = asyncio.create_task(other.step(draw(2)))
    await asyncio.sleep(0.25)

    await other.close()

    with pytest.raises(UsageError):
        await step
    assert torch.equal(await mine.step(draw(3)), oracle.step(draw(3)))
    assert mine.failovers == []


def test_session_that_was_closed_opens_nothing_for_another_number_of_rows() -> None:
    """Another thread may close it between the beginning of a step and that."""

    clock = SystemClock()
    network = MemoryNetwork(LoopbackNetwork(), MemoryDirectoryStore(), clock, "us")
    model = SwarmModel(ModelId("a" * 32), 4, 64)
    with Client.join(ClientConfig(), network, clock, model) as client:
        session = client.open_session(8, Span(0, 4))
        session._make_rows(1)
        session.close()

        with pytest.raises(UsageError, match="closed"):
            session._make_rows(2)
