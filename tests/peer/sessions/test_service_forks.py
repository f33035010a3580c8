"""Sessions that begin with the prefix of another one, at a service."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from service_scene import (
    HELLO,
    FailingEngine,
    Peer,
    assert_declined,
    compute_alone,
    draw_hidden,
    expect_output,
    make_open,
    make_session,
    make_step,
    run,
    with_peer,
)

from shoal.peer.engine.cache import kv_cache
from shoal.peer.engine.cache.kv_cache import IDLE_SECONDS, PrefixCopy, SessionCache
from shoal.peer.engine.engine import Engine
from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import ClientToken
from shoal.protocol.messages.session import Close, Gap, Opened, Welcome

PROMPT = draw_hidden(1, num_tokens=7)
TOKEN = draw_hidden(2)


def make_fork(number: int = 2, prefix_tokens: int = 7, parent: int = 1, **changes: Any) -> Any:
    return make_open(number, parent=make_session(parent), prefix_tokens=prefix_tokens, **changes)


async def begin(peer: Peer) -> Any:
    """Return the stream of a session that holds a prompt."""
    talk = await peer.open()
    expect_output(await talk.ask(make_step(1, 0, PROMPT)))
    return talk


@with_peer(gate="no gate")
async def test_fork_goes_on_from_the_prefix_without_computing_it(
    peer: Peer, engine: Engine
) -> None:
    expected = compute_alone(engine, PROMPT, TOKEN)[1]
    of_five = compute_alone(engine, PROMPT[:, :5], TOKEN)[1]

    talk = await begin(peer)
    used_bytes = await peer.count_used_bytes()

    assert isinstance(await talk.ask(make_fork(2)), Opened)
    assert await peer.count_used_bytes() == 2 * used_bytes
    other = await peer.greet()
    assert isinstance(await other.ask(make_fork(3, 5)), Opened)

    assert peer.engine.num_steps == 1
    assert torch.equal(expect_output(await talk.ask(make_step(1, 7, TOKEN, 2))), expected)
    gap = await other.ask(make_step(1, 6, TOKEN, 3))
    assert isinstance(gap, Gap)
    assert gap.length == 5
    torch.testing.assert_close(expect_output(await other.ask(make_step(2, 5, TOKEN, 3))), of_five)
    assert torch.equal(expect_output(await talk.ask(make_step(2, 7, TOKEN, 1))), expected)


@with_peer()
async def test_fork_outlives_its_parent_and_may_be_forked_itself(
    peer: Peer, engine: Engine
) -> None:
    expected = compute_alone(engine, PROMPT, TOKEN)[1]

    parent, child = await begin(peer), await peer.greet()
    assert isinstance(await child.ask(make_fork(2)), Opened)
    await parent.say(Close(make_session(1), 1))
    await parent.stream.close()

    assert isinstance(await child.ask(make_fork(3, parent=2)), Opened)

    for number in (2, 3):
        output = expect_output(await child.ask(make_step(1, 7, TOKEN, number)))
        assert torch.equal(output, expected)


@with_peer()
async def test_parents_of_others_look_like_parents_that_do_not_exist(peer: Peer) -> None:
    await begin(peer)
    at_home = await peer.dial()
    name = ClientToken(b"somebody's name!")
    assert isinstance(await at_home.ask(replace(HELLO, client=name)), Welcome)
    elsewhere = await peer.at_host("elsewhere").greet()

    answers = [
        assert_declined(await talk.ask(make_fork(2, parent=parent)), ErrorCode.UNKNOWN_SESSION)
        for talk in (at_home, elsewhere)
        for parent in (1, 77)
    ]

    assert len({(answer.detail, answer.retry_after_seconds) for answer in answers}) == 1
    assert set(peer.service.sessions) == {make_session(1)}


@with_peer()
async def test_prefix_that_does_not_fit_is_refused_and_leaves_nothing(peer: Peer) -> None:
    talk = await begin(peer)
    used_bytes = await peer.count_used_bytes()

    assert_declined(await talk.ask(make_fork(prefix_tokens=8)), ErrorCode.BAD_VALUES)

    assert set(peer.service.sessions) == {make_session(1)}
    assert await peer.count_used_bytes() == used_bytes
    assert isinstance(await talk.ask(make_fork()), Opened)


@with_peer()
async def test_parent_that_was_closed_is_gone(peer: Peer) -> None:
    talk = await begin(peer)
    await talk.say(Close(make_session(1), 1))

    assert_declined(await talk.ask(make_fork()), ErrorCode.UNKNOWN_SESSION)


@with_peer(max_sessions=4)
async def test_fork_counts_as_use_of_its_parent(peer: Peer) -> None:
    talk = await begin(peer)
    number = 2
    while isinstance(await talk.ask(make_open(number)), Opened):
        number += 1  # until the client has all the places that it may have
    held = peer.service.sessions[make_session(1)]
    held.used_at -= 2 * IDLE_SECONDS
    held.cache.used_at -= 2 * IDLE_SECONDS

    refusal = assert_declined(await talk.ask(make_fork(number)), ErrorCode.BUSY)

    assert refusal.retry_after_seconds is not None
    assert make_session(1) in peer.service.sessions
    expect_output(await talk.ask(make_step(2, 7, TOKEN)))


# ---- beside others


class PieceGate:
    """Lets pieces of prefixes through one by one, and takes down whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[SessionCache] = []
        self.let_through = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        monkeypatch.setattr(kv_cache, "PIECE_BYTES", 256)
        advance = PrefixCopy.advance

        def wait_and_advance(copy: PrefixCopy) -> bool:
            self.entered.release()
            assert self.let_through.acquire(timeout=30)
            self.copied.append(copy._cache)
            return advance(copy)

        monkeypatch.setattr(PrefixCopy, "advance", wait_and_advance)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)

    def open(self) -> None:
        self.let_through.release(10_000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> PieceGate:
    return PieceGate(monkeypatch)


@with_peer()
async def test_steps_are_computed_between_two_pieces(
    peer: Peer, engine: Engine, gate: PieceGate
) -> None:
    expected = compute_alone(engine, PROMPT, TOKEN)[1]

    talk, other = await begin(peer), await peer.greet()
    await other.say(make_fork())
    await gate.wait_entered()
    await talk.say(make_step(2, 7, TOKEN))
    while not peer.compute._jobs:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0)

    gate.let_through.release()

    assert torch.equal(expect_output(await talk.hear()), expected)
    assert len(gate.copied) == 1
    gate.open()
    assert isinstance(await other.hear(), Opened)
    assert len(gate.copied) > 3
    output = expect_output(await other.ask(make_step(1, 7, TOKEN, 2)))
    assert torch.equal(output, expected)


@with_peer(max_sessions=32)
async def test_forks_take_turns(peer: Peer, engine: Engine, gate: PieceGate) -> None:
    await begin(peer)
    flood = [await peer.greet() for _ in range(4)]
    quiet = peer.at_host("elsewhere")
    theirs = await quiet.greet()
    assert isinstance(await theirs.ask(make_open(20)), Opened)
    expect_output(await theirs.ask(make_step(1, 0, PROMPT, 20)))
    for number, talk in enumerate(flood, start=2):
        await talk.say(make_fork(number))
    await gate.wait_entered()
    await theirs.say(make_fork(21, parent=20))
    # One piece at a time: between two, the thread opens the caches that are still to be opened.
    while engine.pool.num_sessions < 7:
        gate.let_through.release()
        await gate.wait_entered()
    num_before = len(gate.copied)

    gate.open()

    assert isinstance(await theirs.hear(), Opened)
    for talk in flood:
        assert isinstance(await talk.hear(), Opened)
    theirs_cache = peer.service.sessions[make_session(21)].cache
    num_theirs = gate.copied.count(theirs_cache)
    last = max(index for index, cache in enumerate(gate.copied) if cache is theirs_cache)
    # Once they all wait it is one each.
    assert last <= num_before + 5 * num_theirs


@with_peer()
async def test_parent_that_is_rolled_back_meanwhile_ends_the_fork(
    peer: Peer, engine: Engine, gate: PieceGate
) -> None:
    expected = compute_alone(engine, PROMPT[:, :3], TOKEN)[1]

    talk, other = await begin(peer), await peer.greet()
    await other.say(make_fork())
    await gate.wait_entered()
    await talk.say(make_step(2, 3, TOKEN))
    while not peer.compute._jobs:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0)

    gate.open()

    assert_declined(await other.hear(), ErrorCode.BAD_VALUES)
    torch.testing.assert_close(expect_output(await talk.hear()), expected)
    assert isinstance(await other.ask(make_fork(prefix_tokens=4)), Opened)


@with_peer()
async def test_fork_whose_client_leaves_half_way_gives_everything_back(
    peer: Peer, gate: PieceGate
) -> None:
    talk, leaving, other = await begin(peer), await peer.greet(), await peer.greet()
    used_bytes = await peer.count_used_bytes()
    await leaving.say(make_fork(2))
    await gate.wait_entered()
    await other.say(make_fork(3))

    await leaving.stream.close()
    gate.open()

    assert isinstance(await other.hear(), Opened)
    assert await peer.count_used_bytes() == 2 * used_bytes
    assert set(peer.service.sessions) == {make_session(1), make_session(3)}
    assert not peer.service.sessions[make_session(1)].cache._copies_of_us
    expect_output(await talk.ask(make_step(2, 7, TOKEN)))


@with_peer()
async def test_failure_to_copy_a_prefix_leaves_nothing(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = PrefixCopy.advance

    def fail(copy: PrefixCopy) -> bool:
        monkeypatch.setattr(PrefixCopy, "advance", advance)
        raise ZeroDivisionError("the device is on fire")

    talk = await begin(peer)
    used_bytes = await peer.count_used_bytes()
    monkeypatch.setattr(PrefixCopy, "advance", fail)

    assert_declined(await talk.ask(make_fork()), ErrorCode.INTERNAL)

    assert await peer.count_used_bytes() == used_bytes
    assert isinstance(await talk.ask(make_fork()), Opened)


def test_failure_to_open_a_fork_does_not_keep_the_next_one_waiting(engine: Engine) -> None:
    failing = FailingEngine(engine, "open", num_failures=0)

    async def test(peer: Peer) -> None:
        talk = await begin(peer)
        failing.num_failures = 1

        assert_declined(await talk.ask(make_fork()), ErrorCode.INTERNAL)

        assert isinstance(await talk.ask(make_fork()), Opened)

    run(failing, test)
