"""A peer without room for a session says so, and lets those wait who want to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service_scene import (
    Peer,
    Talk,
    assert_declined,
    draw_hidden,
    expect_output,
    make_open,
    make_session,
    make_step,
    with_peer,
)

from shoal.peer.engine.cache.kv_cache import IDLE_SECONDS
from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.session import Close, Opened, Queued

PATIENT = {"max_wait_seconds": 100.0}


def now() -> float:
    return asyncio.get_running_loop().time()


async def fill(peer: Peer, num_sessions: int) -> list[Talk]:
    """Take every place, each for another host, and keep the sessions busy."""
    return [await peer.at_host(f"tenant {n}").open(100 + n) for n in range(num_sessions)]


async def close(talk: Talk, number: int) -> None:
    await talk.say(Close(make_session(number), 1))


@with_peer(max_sessions=2)
async def test_who_has_no_patience_is_told_when_to_ask_again(peer: Peer) -> None:
    await fill(peer, 2)
    await asyncio.sleep(6)
    talk = await peer.at_host("newcomer").greet()

    refusal = assert_declined(await talk.ask(make_open(1)), ErrorCode.BUSY)

    # Two sessions of at least 6 seconds: one of them should end every 3 seconds.
    assert refusal.retry_after_seconds == 3.0


@with_peer(max_sessions=4)
async def test_adapter_that_is_being_fetched_has_nothing_to_do_with_who_is_there(
    peer: Peer,
) -> None:
    await fill(peer, 2)
    await asyncio.sleep(6)
    talk = await peer.at_host("newcomer").greet()
    opening = make_open(1, adapter=AdapterId(b"published" + bytes(23)))
    refusal = assert_declined(await talk.ask(opening), ErrorCode.UNKNOWN_ADAPTER)
    assert refusal.retry_after_seconds == 1.0


@with_peer(max_sessions=2)
async def test_session_is_opened_as_soon_as_there_is_room(peer: Peer) -> None:
    await fill(peer, 2)
    talk = await peer.at_host("newcomer").greet()

    queued = await talk.ask(make_open(1, **PATIENT))
    assert isinstance(queued, Queued)
    assert queued.session == make_session(1)
    asyncio.get_running_loop().call_later(5, peer.network.kill, "tenant 0")
    started_at = now()
    assert isinstance(await talk.hear(), Opened)

    assert 5 <= now() - started_at < 5.5
    hidden = draw_hidden(1, 1, 3)
    expect_output(await talk.ask(make_step(1, 0, hidden)))


@with_peer(max_sessions=3)
async def test_those_who_wait_are_served_in_their_order(peer: Peer) -> None:
    tenants = await fill(peer, 3)
    talks = [await peer.at_host(f"waiter {number}").greet() for number in range(3)]
    for number, talk in enumerate(talks):
        assert isinstance(await talk.ask(make_open(number, **PATIENT)), Queued)
    order: list[int] = []

    async def hear(number: int) -> None:
        assert isinstance(await talks[number].hear(), Opened)
        order.append(number)
        await close(talks[number], number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(hear(number))
        await close(tenants[0], 100)

    assert order == [0, 1, 2]


@with_peer(max_sessions=1)
async def test_wait_ends_in_time_and_with_a_reason(peer: Peer) -> None:
    tenants = await fill(peer, 1)
    talk = await peer.at_host("newcomer").greet()
    assert isinstance(await talk.ask(make_open(1, max_wait_seconds=4.0)), Queued)
    started_at = now()

    refusal = assert_declined(await talk.hear(), ErrorCode.BUSY)

    assert refusal.session == make_session(1)
    assert 4 <= now() - started_at < 4.5
    assert refusal.retry_after_seconds
    await close(tenants[0], 100)


@with_peer(max_sessions=1)
async def test_who_waits_goes_on_talking_and_may_give_up(peer: Peer) -> None:
    tenants = await fill(peer, 1)
    talk = await peer.at_host("newcomer").greet()
    assert isinstance(await talk.ask(make_open(1, **PATIENT)), Queued)
    step = make_step(1, 0, draw_hidden(1, 1, 3))
    await talk.say(step, Close(make_session(1), 1))
    assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)

    await close(tenants[0], 100)
    assert isinstance(await talk.ask(make_open(2)), Opened)


@with_peer(max_sessions=1)
async def test_who_hangs_up_waits_no_longer(peer: Peer) -> None:
    await fill(peer, 1)
    for number, how in enumerate(("close", "kill")):
        host = f"newcomer {number}"
        talk = await peer.at_host(host).greet()
        assert isinstance(await talk.ask(make_open(1, **PATIENT)), Queued)
        assert peer.service.admission.num_waiting == 1
        if how == "close":
            await talk.stream.close()
        else:
            peer.network.kill(host)
        await asyncio.sleep(0.1)
        assert peer.service.admission.num_waiting == 0


@with_peer(max_sessions=1)
async def test_who_may_not_be_served_at_all_does_not_wait(peer: Peer) -> None:
    await fill(peer, 1)
    talk = await peer.at_host("newcomer").greet()

    opening = replace(make_open(1, **PATIENT), max_tokens=10**6)
    assert_declined(await talk.ask(opening), ErrorCode.TOO_LONG)


@with_peer(max_sessions=1)
async def test_peer_that_drains_lets_nobody_wait(peer: Peer) -> None:
    await fill(peer, 1)
    talk = await peer.at_host("newcomer").greet()
    assert isinstance(await talk.ask(make_open(1, **PATIENT)), Queued)
    started_at = now()

    peer.service.begin_draining()
    peer.network.kill("tenant 0")
    assert await peer.service.wait_until_empty(60)
    assert peer.service.admission.num_waiting == 0

    assert_declined(await talk.hear(), ErrorCode.DRAINING)
    assert now() - started_at < 0.5


@with_peer(max_sessions=4)
async def test_one_address_does_not_fill_the_queue(peer: Peer) -> None:
    tenants = await fill(peer, 4)
    greedy = await peer.at_host("greedy").greet()
    answers = [await greedy.ask(make_open(n, **PATIENT)) for n in range(8)]
    assert isinstance(answers[0], Queued)
    assert_declined(answers[-1], ErrorCode.BUSY)
    assert peer.service.admission.num_waiting < 4

    other = await peer.at_host("other").greet()
    assert isinstance(await other.ask(make_open(20, **PATIENT)), Queued)
    await close(tenants[0], 100)


@with_peer(max_sessions=2)
async def test_session_that_is_idle_gives_up_its_place(peer: Peer) -> None:
    idle = await peer.at_host("idle").greet()
    for number in range(2):
        assert isinstance(await idle.ask(make_open(number)), Opened)
    hidden = draw_hidden(1, 1, 3)
    await asyncio.sleep(IDLE_SECONDS - 1)
    expect_output(await idle.ask(make_step(1, 0, hidden, 0)))
    await asyncio.sleep(1)
    newcomer = await peer.at_host("newcomer").greet()

    assert isinstance(await newcomer.ask(make_open(5)), Opened)

    unknown = await idle.ask(make_step(1, 0, hidden, 1))
    assert_declined(unknown, ErrorCode.UNKNOWN_SESSION)
    expect_output(await idle.ask(make_step(2, 3, hidden, 0)))


@with_peer(max_sessions=2)
async def test_late_end_of_a_stream_leaves_a_new_session_of_the_same_id_alone(peer: Peer) -> None:
    first = await peer.at_host("idle").open(1)
    assert isinstance(await first.ask(make_open(2)), Opened)
    await asyncio.sleep(IDLE_SECONDS)
    await peer.at_host("newcomer").open(3)
    assert make_session(1) not in peer.service.sessions, "it was the oldest"
    await close(first, 2)
    await first.wait_until_read()
    again = await peer.at_host("idle").greet()
    assert isinstance(await again.ask(make_open(1)), Opened)

    await first.stream.close()
    await asyncio.sleep(0.1)

    expect_output(await again.ask(make_step(1, 0, draw_hidden(1, 1, 3))))
