"""A session whose hops are lost: others take over, and no number changes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from session_scene import (
    CONFIG,
    WIDTH,
    FakePeer,
    Oracle,
    SessionScene,
    add_two_rows_of_peers,
    decline_when,
    draw,
    in_scene,
    now,
)
from virtual_time import VirtualClock

from shoal.protocol.errors import ErrorCode
from shoal.protocol.identity import Identity
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.session import Step
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.spans import Span


@pytest.mark.parametrize("seed", range(3))
@in_scene(Link(delay_seconds=0.02), replace(CONFIG, max_step_bytes=2 * 4 * WIDTH * 4))
async def test_hops_lost_while_pieces_are_under_way_are_replaced(
    scene: SessionScene, seed: int
) -> None:
    """Kills, pauses and partitions of hops at any moment of a prompt, one or several."""
    print(f"seed {seed}")

    rng = random.Random(seed)

    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(400), Oracle()
    for number in range(4):
        row_map = (1, 0) if number else None
        task = asyncio.create_task(session.step(draw(number, 30, 2), row_map))
        for _ in range(rng.randint(1, 3)):
            await asyncio.sleep(rng.random() * 0.5)
            if not session.hops:
                continue
            victim = scene.peer_of(session, rng.randrange(len(session.hops)))
            getattr(scene.network, rng.choice(("kill", "pause")))(victim.name)
            name = f"{victim.name}-{len(scene.peers)}"
            await scene.add(name, victim.span.start, victim.span.stop)
        assert torch.equal(await task, oracle.step(draw(number, 30, 2), row_map))
    assert torch.equal(await session.step(draw(9, 1, 2)), oracle.step(draw(9, 1, 2)))
    assert session.failovers


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("trouble", ["kill", "pause", "partition"])
@in_scene()
async def test_hop_in_trouble_is_replaced_and_the_others_keep_their_caches(
    scene: SessionScene, trouble: str, hop: int
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    for index in range(4):
        hidden = draw(index, 1 + 5 * (index == 0))
        assert torch.equal(await session.step(hidden), oracle.step(hidden))
    lost, before = scene.peer_of(session, hop), scene.names_of(session)
    others = [scene.peer_of(session, index) for index in range(3) if index != hop]
    counts = [len(peer.steps) for peer in others]

    if trouble == "partition":
        scene.network.partition("client", lost.name)
    else:
        getattr(scene.network, trouble)(lost.name)
    for index in range(4, 8):
        hidden = draw(index)
        assert torch.equal(await session.step(hidden), oracle.step(hidden))

    (failover,) = session.failovers
    assert failover.lost.peer.peer_id == lost.identity.peer_id
    assert (failover.position, failover.num_replayed_tokens) == (9, 9)
    assert [old == new for old, new in zip(before, scene.names_of(session), strict=True)] == [
        index != hop for index in range(3)
    ]
    assert [len(peer.steps) - n for peer, n in zip(others, counts, strict=True)] == [4, 4]
    assert scene.quarantined == [lost.name]
    if trouble == "partition":
        scene.network.heal("client", lost.name)


@in_scene()
async def test_all_hops_may_be_lost_at_once(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    hidden = draw(1, 7)
    assert torch.equal(await session.step(hidden), oracle.step(hidden))

    for name in scene.names_of(session):
        scene.network.kill(name)

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    assert len(session.failovers) == 3


@in_scene()
async def test_one_hop_may_be_replaced_by_several(scene: SessionScene) -> None:
    whole = await scene.add("whole", 0, 6, decode_steps_per_second=1e6)
    session, oracle = scene.open_session(), Oracle()
    steps = [draw(1, 5, 2), draw(2, 1, 2), draw(3, 1, 2)]
    for hidden, row_map in zip(steps, (None, (1, 0), (1, 1)), strict=True):
        assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
    for index in range(6):
        await scene.add(f"part{index}", index, index + 1)
    scene.network.kill(whole.name)
    await scene.swarm.book.refresh()

    hidden = draw(4, 1, 2)
    assert torch.equal(await session.step(hidden), oracle.step(hidden))
    assert len(session.hops) == 6
    scene.network.kill("part3")
    await scene.add("other3", 3, 4)
    assert torch.equal(await session.step(hidden), oracle.step(hidden))


@pytest.mark.parametrize("first_position", [0, 3], ids=["first step", "later"])
@in_scene()
async def test_peer_that_keeps_losing_sessions_is_left(
    scene: SessionScene, first_position: int
) -> None:
    """It opens and replays well, so it would be chosen again for every step."""
    liar = await scene.add("liar", 0, 6, decode_steps_per_second=1e6)
    await scene.add("honest", 0, 6)
    session, oracle = scene.open_session(), Oracle()
    liar.mischief = decline_when(
        lambda message: isinstance(message, Step) and message.position >= first_position,
        ErrorCode.UNKNOWN_SESSION,
        None,
    )
    if first_position:
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        assert scene.names_of(session) == ["liar"]

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    assert scene.names_of(session) == ["honest"]
    assert scene.quarantined == ["liar"]
    assert now() < 1


@in_scene()
async def test_restarted_peer_is_preferred_to_a_slower_replica_and_not_blamed(
    scene: SessionScene,
) -> None:
    peer = await scene.add("a", 0, 6, decode_steps_per_second=1e6)
    await scene.add("slow", 0, 6)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))

    peer.caches.clear()

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    assert len(session.failovers) == 1
    assert scene.names_of(session) == ["a"]
    assert scene.quarantined == []


@pytest.mark.parametrize("becomes", ["other blocks", "another peer"])
@in_scene()
async def test_peer_that_is_not_what_an_old_view_says_is_used_as_soon_as_it_announces_itself(
    scene: SessionScene, becomes: str
) -> None:
    peer = await scene.add("a", 0, 6)
    await scene.add("tail", 5, 6, decode_steps_per_second=0.1)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1)), oracle.step(draw(1)))
    assert scene.names_of(session) == ["a"]
    (endpoint,) = session.hops[0].peer.endpoints
    scene.network.kill("a")
    scene.network.revive("a")
    stranger = FakePeer("b", Identity(bytes([9]) * 32), Span(0, 6))
    if becomes == "other blocks":
        peer.span = Span(0, 5)
    transport = scene.make_transport("a")
    at_old_port = stranger if becomes == "another peer" else peer
    await transport.listen("a", endpoint.port, at_old_port.serve)
    moved = await transport.listen("a", 0, peer.serve)
    step = asyncio.create_task(session.step(draw(2)))
    await asyncio.sleep(0.5)
    assert not step.done()

    await scene.announce_peer(peer, endpoints=(moved.endpoint,))

    assert torch.equal(await step, oracle.step(draw(2)))
    assert scene.names_of(session)[0] == "a"
    assert now() < 3


@in_scene()
async def test_peer_that_announced_to_take_for_ever_is_left_in_half_a_minute(
    scene: SessionScene,
) -> None:
    await scene.add("liar", 0, 6, decode_steps_per_second=1e-9)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 20)), oracle.step(draw(1, 20)))
    await scene.add("honest", 0, 6)
    scene.network.pause("liar")
    started_at = now()

    assert torch.equal(await session.step(draw(2, 20)), oracle.step(draw(2, 20)))

    assert scene.names_of(session) == ["honest"]
    assert now() - started_at < 35


@pytest.mark.parametrize("kilobits_per_second", [5000, 1000])
@in_scene()
async def test_slow_uplink_is_not_the_fault_of_the_peers(
    scene: SessionScene, kilobits_per_second: int
) -> None:
    uplink = Link(0.02, kilobits_per_second * 1e3 / 8)
    for name in ("a", "b", "c"):
        await scene.add(name, 0, 6, prefill_tokens_per_second=1e6)
        scene.network.set_link("client", name, uplink)
    session, oracle = scene.open_session(max_tokens=1100), Oracle()
    prompt = draw(1, 1024, num_rows=256)  # 4 MiB, of which 5 Mbit/s carry 0.6 a second

    num_bytes = 0
    for part in prompt.split(128 if kilobits_per_second < 5000 else 1024, dim=1):
        assert torch.equal(await session.step(part), oracle.step(part))
        num_bytes += part.numel() * 4

    assert now() > num_bytes / uplink.bandwidth_bytes_per_second
    assert (session.failovers, scene.quarantined) == ([], [])


@in_scene()
async def test_black_holes_that_announce_wonders_do_not_keep_a_session_from_opening(
    scene: SessionScene,
) -> None:
    holes = [f"hole{number}" for number in range(8)]
    wonders: dict[str, Any] = {
        "decode_steps_per_second": 1e9,
        "prefill_tokens_per_second": None,
    }
    endpoints: dict[str, Any] = {}
    for name in holes:
        await scene.add(name, 0, 6, **wonders)
        scene.network.pause(name)
    await scene.add("honest", 0, 6)
    for peer in (await scene.swarm.book.refresh()).peers:
        endpoints[peer.peer_id] = peer.endpoints

    for index in range(4):
        session, oracle = scene.open_session(secret=SessionId(bytes([index]) * 16)), Oracle()
        started_at = now()
        assert torch.equal(await session.step(draw(1)), oracle.step(draw(1)))
        assert now() - started_at < (CONFIG.failover_timeout_seconds if index == 0 else 5)
        await asyncio.sleep(60)
        for name in holes:
            hole = scene.peers[name]
            await scene.announce_peer(hole, endpoints=endpoints[hole.identity.peer_id], **wonders)


@in_scene()
async def test_silent_peer_that_goes_on_after_its_replacement_disturbs_nobody(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    silent = scene.peer_of(session, 1)
    scene.network.pause(silent.name)
    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    scene.network.resume(silent.name)

    for index in range(3, 8):
        assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))
    await asyncio.sleep(1)

    assert silent.caches == {}


@pytest.mark.parametrize("moment", ["the question travels", "the answer travels", "all are asked"])
@in_scene(Link(delay_seconds=0.02))
async def test_process_that_was_stopped_looks_for_the_answer_before_it_blames_a_peer(
    scene: SessionScene, moment: str
) -> None:
    seconds = {"the question travels": 0.01, "the answer travels": 0.03, "all are asked": 0.09}

    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    loop = asyncio.get_running_loop()

    loop.call_later(seconds[moment], VirtualClock().stall, 60.0)  # Ctrl-Z and, later, fg
    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    assert session.failovers == []
    assert scene.quarantined == []


@in_scene()
async def test_peer_that_died_while_the_process_was_stopped_is_replaced(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    scene.network.pause(scene.names_of(session)[1])

    asyncio.get_running_loop().call_later(0.5, VirtualClock().stall, 60.0)
    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    assert len(session.failovers) == 1
    assert now() < 70


@in_scene()
async def test_only_peer_that_was_silent_for_a_while_is_used_again(scene: SessionScene) -> None:
    await scene.add("a", 0, 6)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
    scene.network.pause("a")
    asyncio.get_running_loop().call_later(7, scene.network.resume, "a")

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    assert 7 <= now() < 15


@in_scene()
async def test_replacement_of_the_same_weights_is_preferred(scene: SessionScene) -> None:
    await scene.add("a", 0, 6, weights="int8")
    session = scene.open_session()
    await session.step(draw(1, 3))
    await scene.add("fast", 0, 6, weights="fp32", decode_steps_per_second=1e6)
    await scene.add("same", 0, 6, weights="int8")
    scene.network.kill("a")
    await scene.swarm.book.refresh()

    await session.step(draw(2))
    assert scene.names_of(session) == ["same"]
    assert session.failovers[-1].changed_weights is None
    scene.network.kill("same")
    await session.step(draw(3))
    assert scene.names_of(session) == ["fast"]
    assert session.failovers[-1].changed_weights == "fp32"


@in_scene()
async def test_directory_that_cannot_be_read_does_not_stop_a_failover(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1)), oracle.step(draw(1)))
    await asyncio.sleep(100)
    scene.store.is_reachable = False
    scene.network.kill(scene.peer_of(session, 1).name)

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
