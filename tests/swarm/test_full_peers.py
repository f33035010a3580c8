"""Peers without room: a client takes another one, or waits in a queue and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from virtual_swarm import VirtualSwarm, draw, run_scene
from virtual_time import VirtualClock

from shoal.client.session.session import RemoteSession
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.errors import ErrorCode, RefusedError

CONFIG = ClientConfig(seed=0, failover_timeout_seconds=8.0)


def run(
    directory: Any, hosts: dict[str, int], story: Callable[[VirtualSwarm], Awaitable[None]]
) -> None:
    """Tell a story of clients and of peers that hold so many sessions each."""

    async def main(scene: VirtualSwarm) -> None:
        for host, max_sessions in hosts.items():
            await scene.add(host, max_sessions=max_sessions)
        await story(scene)

    run_scene(directory, CONFIG, main)


async def keep_busy(session: RemoteSession, seconds: float) -> None:
    """Step a session now and then, and close it."""
    for number in range(int(seconds)):
        await session.step(draw(number, 1))
        await asyncio.sleep(1)
    await session.close()


def test_client_waits_in_the_queue_of_a_full_peer_and_says_so(tiny_models: Any) -> None:
    async def story(scene: VirtualSwarm) -> None:
        first, second = await scene.join("first"), await scene.join("second")
        await first.step(draw(1, 5))
        started_at = VirtualClock().now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_busy(first, 5))
            waiting = tasks.create_task(second.step(draw(2, 3)))
            await asyncio.sleep(3)
            assert not waiting.done()
            assert "room at peer …" in str(second.state.waiting)

        assert 5 <= VirtualClock().now() - started_at < 5.5
        assert second.state.waiting is None
        assert second.position == 3

    run(tiny_models.get().directory, {"only": 1}, story)


def test_client_takes_another_peer_instead_of_waiting(tiny_models: Any) -> None:
    async def story(scene: VirtualSwarm) -> None:
        sessions = [await scene.join(f"client {number}") for number in range(2)]
        started_at = VirtualClock().now()
        for session in sessions:
            await session.step(draw(1, 5))

        assert VirtualClock().now() - started_at < 1
        used = {hop.peer.peer_id for session in sessions for hop in session.hops}
        assert len(used) == 2

    run(tiny_models.get().directory, {"one": 1, "other": 1}, story)


def test_client_is_told_when_the_queue_was_too_long(tiny_models: Any) -> None:
    async def story(scene: VirtualSwarm) -> None:
        first, second = await scene.join("first"), await scene.join("second")
        await first.step(draw(1, 5))
        started_at = VirtualClock().now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_busy(first, 12))
            with pytest.raises(RefusedError) as refused:
                await second.step(draw(2, 3))

            assert refused.value.code is ErrorCode.BUSY
            assert 8 <= VirtualClock().now() - started_at < 10
            assert second.position == 0

        await second.step(draw(2, 3))

    run(tiny_models.get().directory, {"only": 1}, story)


def test_session_that_lost_its_place_while_idle_goes_on_by_replay(tiny_models: Any) -> None:
    async def story(scene: VirtualSwarm) -> None:
        idle, other = await scene.join("idle"), await scene.join("other")
        undisturbed = await scene.join("undisturbed")
        outputs = [await undisturbed.step(draw(1, 5)), await undisturbed.step(draw(2, 1))]
        await undisturbed.close()
        await idle.step(draw(1, 5))
        also = await scene.join("idle")
        await also.step(draw(7, 2))
        await asyncio.sleep(15)

        await other.step(draw(3, 3))
        await other.close()
        again = await idle.step(draw(2, 1))

        assert len(idle.failovers) == 1
        assert (again - outputs[1]).abs().max() < 1e-5

    run(tiny_models.get().directory, {"only": 2}, story)
