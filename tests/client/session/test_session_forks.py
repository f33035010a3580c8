"""Sessions that begin with the first tokens of another one, over a swarm of scripted peers."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import replace

import pytest
import torch
from session_scene import (
    SECRET,
    FakePeer,
    Oracle,
    SessionScene,
    add_two_rows_of_peers,
    decline_when,
    draw,
    in_scene,
)
from session_scene import Answer as FakeAnswer

from shoal.client.session.session import RemoteSession
from shoal.protocol.errors import ErrorCode, UsageError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Open
from shoal.protocol.net.memory.loopback import Link

SLOW = Link(delay_seconds=0.05)


def open_twin(scene: SessionScene) -> RemoteSession:
    """Return a session that has not begun, with a secret of its own."""
    return scene.open_session(secret=SessionId(len(scene.sessions).to_bytes(16, "big")))


def fork_oracle(oracle: Oracle, position: int) -> Oracle:
    twin = copy.copy(oracle)
    twin.position = position
    return twin


def is_fork(message: Message) -> bool:
    return isinstance(message, Open) and message.parent is not None


def ignore_parent(peer: FakePeer, message: Message, answer: FakeAnswer) -> FakeAnswer:
    """Say that a fork is open and begin it with nothing."""
    if isinstance(message, Open) and message.parent is not None:
        cache = peer.caches[message.session]
        cache.tokens_BSH = cache.tokens_BSH[:, :0]
    return answer


@pytest.mark.parametrize("seed", range(6))
@in_scene()
async def test_any_tree_of_forks_equals_machines_of_their_own(
    scene: SessionScene, seed: int
) -> None:
    rng = random.Random(seed)

    await add_two_rows_of_peers(scene)
    scene.peers["a1"].mischief = decline_when(
        lambda message: is_fork(message) and rng.random() < 0.3,
        ErrorCode.UNKNOWN_SESSION,
        None,
    )
    grown = [(scene.open_session(), Oracle())]
    for number in range(60):
        session, oracle = rng.choice(grown)
        event = rng.random()
        if event < 0.2:
            position = rng.randint(0, session.position)
            twin = open_twin(scene)
            await session.fork_into(twin, position)
            assert twin.position == position
            grown.append((twin, fork_oracle(oracle, position)))
        elif event < 0.3:
            position = rng.randint(0, session.position)
            session.rollback(position)
            oracle.position = position
        elif event < 0.35 and len(grown) > 1:
            grown.remove((session, oracle))
            await session.close()
        elif session.position < 80:
            hidden = draw(number, rng.choice((1, 1, 5)), num_rows=2)
            row_map = rng.choice((None, None, (1, 0), (1, 1)))
            output = await session.step(hidden, row_map)
            assert torch.equal(output, oracle.step(hidden, row_map))


@in_scene()
async def test_fork_sends_no_token_again_and_keeps_no_second_log(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, twin, oracle = scene.open_session(), open_twin(scene), Oracle()
    prompt = draw(1, 6)
    await session.step(prompt)
    oracle.step(prompt)

    await session.fork_into(twin, 4)
    oracle.position = 4
    assert torch.equal(await twin.step(draw(2)), oracle.step(draw(2)))

    assert twin.hops == session.hops
    assert twin.failovers == []
    for hop, (live, of_twin) in enumerate(zip(session._hops, twin._hops, strict=True)):
        steps = scene.peer_of(session, hop).steps
        assert [(step.position, step.hidden.tokens) for step in steps] == [(0, 6), (4, 1)]
        pieces = live.log.plan_replay(), of_twin.log.plan_replay()
        assert pieces[0][0].payload is pieces[1][0].payload


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
@in_scene()
async def test_peer_that_declines_a_fork_gets_a_replay(
    scene: SessionScene, code: ErrorCode
) -> None:
    for name, start, stop in (("a", 0, 3), ("b", 3, 6)):
        await scene.add(name, start, stop)
    session, twin, oracle = scene.open_session(), open_twin(scene), Oracle()
    await session.step(draw(1, 6))
    oracle.step(draw(1, 6))
    scene.peers["b"].mischief = decline_when(is_fork, code, None)

    await session.fork_into(twin, 6)
    assert torch.equal(await twin.step(draw(2)), oracle.step(draw(2)))

    (failover,) = twin.failovers
    assert (failover.lost.span, failover.num_replayed_tokens) == (session.hops[1].span, 6)
    assert scene.names_of(twin) == ["a", "b"]
    assert [step.position for step in scene.peers["a"].steps] == [0, 6]


@in_scene()
async def test_peer_that_forks_without_the_prefix_is_found_out(scene: SessionScene) -> None:
    await add_two_rows_of_peers(scene)
    session, twin, oracle = scene.open_session(), open_twin(scene), Oracle()
    await session.step(draw(1, 6))
    oracle.step(draw(1, 6))
    liar = scene.peer_of(session, 1)
    liar.mischief = lambda message, answer: ignore_parent(liar, message, answer)

    await session.fork_into(twin, 6)

    assert torch.equal(await twin.step(draw(2)), oracle.step(draw(2)))
    assert "lost the prefix" in twin.failovers[0].reason


@in_scene()
async def test_fork_of_a_session_whose_step_failed_takes_what_was_answered(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session, twin, oracle = scene.open_session(), open_twin(scene), Oracle()
    await session.step(draw(1, 6, 2))
    oracle.step(draw(1, 6, 2))
    for name in ("c1", "c2"):
        scene.peers[name].mischief = lambda message, answer: (
            answer if not hasattr(message, "hidden") else None
        )
    with pytest.raises(Exception, match="blocks 4:6"):
        await session.step(draw(2, 3, 2))
    for name in ("c1", "c2"):
        scene.peers[name].mischief = lambda _, answer: answer

    await session.fork_into(twin, 6)

    expected = fork_oracle(oracle, 6).step(draw(3, 1, 2), (1, 0))
    assert torch.equal(await twin.step(draw(3, 1, 2), (1, 0)), expected)
    assert torch.equal(await session.step(draw(2, 3, 2)), oracle.step(draw(2, 3, 2)))


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.12, 0.17])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "cancelled"])
@in_scene(SLOW)
async def test_fork_that_is_cut_short_leaves_nothing(
    scene: SessionScene, seconds: float, is_closed: bool
) -> None:
    await add_two_rows_of_peers(scene)
    session, twin = scene.open_session(), open_twin(scene)
    await session.step(draw(1, 6))
    forking = asyncio.create_task(session.fork_into(twin, 6))
    await asyncio.sleep(seconds)

    if is_closed:
        await session.close()
        with pytest.raises(UsageError, match="closed"):
            await forking
    else:
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        await session.close()

    assert (twin.hops, twin.position) == ((), 0)
    assert scene.quarantined == []
    await asyncio.sleep(1)
    assert [name for name, peer in scene.peers.items() if peer.caches] == []


@in_scene(SLOW)
async def test_fork_that_is_cut_short_hangs_up_on_those_who_had_opened_it(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session, twin = scene.open_session(), open_twin(scene)
    await session.step(draw(1, 6))
    *others, silent = (scene.peer_of(session, hop) for hop in range(3))
    scene.network.pause(silent.name)
    forking = asyncio.create_task(session.fork_into(twin, 6))
    await asyncio.sleep(0.3)
    assert [len(peer.caches) for peer in others] == [2, 2]

    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking

    await asyncio.sleep(1)
    assert [len(peer.caches) for peer in others] == [1, 1]


@in_scene()
async def test_sessions_of_a_fork_have_ids_of_their_own(scene: SessionScene) -> None:
    peer = await scene.add("a", 0, 6)
    session, twin = scene.open_session(), open_twin(scene)
    await session.step(draw(1, 6))

    await session.fork_into(twin, 5)

    first, second = peer.opens
    assert (second.parent, second.prefix_tokens) == (first.session, 5)
    assert SECRET not in (first.session, second.session)
    assert replace(second, session=first.session, parent=None, prefix_tokens=0) == first
