"""Steps that failed or were cancelled leave a session that can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from session_scene import (
    CONFIG,
    WIDTH,
    Answer,
    Mischief,
    Oracle,
    SessionScene,
    add_two_rows_of_peers,
    draw,
    in_scene,
)

from shoal.protocol.errors import RouteError
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Step
from shoal.protocol.net.memory.loopback import Link


@in_scene()
async def test_hops_are_dropped_together_even_if_hanging_up_is_cancelled(
    scene: SessionScene,
) -> None:
    """Dropped one after the other, a hop whose rows were moved could be taken for one that was
    not asked yet.
    """
    may_close = asyncio.Event()

    class SlowLink:
        async def close(self) -> None:
            await may_close.wait()

    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))
    links: list[Any] = [live.link for live in session._hops]
    for live in session._hops:
        live.link = cast(Any, SlowLink())

    task = asyncio.create_task(session._restore([(live, live.log) for live in session._hops]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert [live.link for live in session._hops] == [None] * 3
    for link in links:
        await link.close()
    may_close.set()


@in_scene()
async def test_link_is_closed_even_if_its_caller_is_cancelled_as_hanging_up_begins(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session = scene.open_session()
    await session.step(draw(1, 3))
    live, *_ = session._hops

    task = asyncio.create_task(session.exchange.hang_up(live))
    await asyncio.sleep(0)  # the task gave the link up and waits; nothing was closed yet
    assert live.link is None
    task.cancel()
    await asyncio.wait([task])
    await scene.member.close_sessions()
    await asyncio.sleep(1)

    assert task.cancelled()
    assert [name for name, peer in scene.peers.items() if peer.caches] == scene.names_of(session)[
        1:
    ]


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [1, 7], ids=["token", "pieces"])
@in_scene(config=replace(CONFIG, max_step_bytes=3 * 3 * WIDTH * 4))
async def test_step_that_moved_rows_and_failed_can_be_tried_again(
    scene: SessionScene, num_tokens: int, hop: int
) -> None:
    """A peer cannot undo a row map: applied twice it would be wrong."""

    def at_last_piece(scene: SessionScene, name: str) -> Iterator[Mischief]:
        count = 0

        def mischief(message: Message, answer: Answer) -> Answer:
            nonlocal count
            if isinstance(message, Step):
                count += 1
                if count == -(-num_tokens // 3):
                    scene.network.kill(name)
                    return None
            return answer

        yield mischief

    spans = (("a", 0, 2), ("b", 2, 4), ("c", 4, 6))
    for name, start, stop in spans:
        await scene.add(name, start, stop)
    session, oracle = scene.open_session(), Oracle()
    rows = 3
    assert torch.equal(await session.step(draw(1, 2, rows)), oracle.step(draw(1, 2, rows)))
    hidden, row_map = draw(2, num_tokens, rows), (1, 2, 0)
    assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
    name, start, stop = spans[hop]
    scene.peers[name].mischief = next(at_last_piece(scene, name))

    with pytest.raises(RouteError):
        await session.step(hidden, row_map)
    assert session.position == 2 + num_tokens
    await scene.add("new", start, stop)

    assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
    assert torch.equal(await session.step(draw(3, 1, rows)), oracle.step(draw(3, 1, rows)))


@pytest.mark.parametrize("row_map", [None, (1, 0)], ids=["plain", "rows"])
@in_scene(Link(delay_seconds=0.05))
async def test_step_that_is_cancelled_anywhere_can_be_tried_again(
    scene: SessionScene, row_map: tuple[int, ...] | None
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(1000), Oracle()
    # Opening takes two round trips of 0.1 s, and a step one for each hop.
    for index in range(14):
        hidden = draw(index, 2, 2)
        task = asyncio.create_task(session.step(hidden, row_map))
        await asyncio.sleep(0.05 * index)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            assert torch.equal(task.result(), oracle.step(hidden, row_map))
        assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))

    assert scene.quarantined == []


@in_scene(Link(delay_seconds=0.01))
async def test_opening_that_is_cancelled_leaves_nothing_at_the_peers(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    # One of the hops is slower, so that the others are open when it ends.
    for name in ("c1", "c2"):
        scene.network.set_link("client", name, Link(delay_seconds=0.3))
    session = scene.open_session()
    task = asyncio.create_task(session.step(draw(1)))
    await asyncio.sleep(0.25)
    opened = [name for name, peer in scene.peers.items() if peer.caches]
    assert opened
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(30)

    # The session was not closed, and still nobody holds anything.
    assert [name for name, peer in scene.peers.items() if peer.caches] == []
