"""Swarms whose caches are full: passed over, waited for, and told at last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from memory_swarm import look_into
from story_cases import in_chains
from story_outputs import assert_same

from shoal.protocol.errors import CacheFullError, UsageError
from shoal.protocol.net.memory.loopback import Link

PAGE_BYTES = 64 * 2 * 256
"""64 tokens of one row in the two blocks of a peer, each 2 x 2 heads x 16 numbers of 4 bytes."""


async def fill_cache(peer: Any, num_tokens: int) -> Callable[[], None]:
    """Let somebody else take the memory of so many tokens; return what gives it back."""
    service = look_into(peer)

    def take() -> Any:
        cache = service.engine.pool.open(1, num_tokens, service.engine.span)
        cache.prepare(0, num_tokens)
        return cache

    cache = await service.compute.call(take)
    return lambda: service.compute.post(cache.close)


def test_full_replica_is_passed_over_for_the_other(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns()
        for host, other in (("peer2", "peer3"), ("peer3", "peer2")):
            assert await look_into(world.peer_on(host)).wait_until_empty(30)
            give_back = await fill_cache(world.peer_on(host), 256)
            session = world.open()

            outputs = await world.take_all(session, turns)

            assert_same(outputs, world.expect(turns))
            assert world.hosts_of(session)[1] == other
            await session.close()
            give_back()

    run_story(story, kv_budget_bytes=4 * PAGE_BYTES)


def test_session_that_finds_its_cache_full_half_way_moves_on(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(prompt_tokens=60, num_decoded=8)
        outputs = await world.take_all(session, turns[:2])
        host = world.hosts_of(session)[1]
        give_back = await fill_cache(world.peer_on(host), 192)

        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        assert host not in world.hosts_of(session)
        (failover,) = session.failovers
        assert failover.position == 64
        give_back()

    run_story(story, kv_budget_bytes=4 * PAGE_BYTES)


def test_full_swarm_is_waited_for_and_then_the_refusal_is_told(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        give_back = [await fill_cache(world.peer_on(host), 256) for host in ("peer2", "peer3")]

        with pytest.raises(CacheFullError) as error:
            await world.take(session, turns[0])

        assert error.value.retry_after_seconds is not None
        for give in give_back:
            give()
        assert_same(await world.take_all(session, turns), world.expect(turns))

    run_story(story, kv_budget_bytes=4 * PAGE_BYTES, failover_timeout_seconds=0.5)


@pytest.mark.slow
@in_chains("freed", {host: host for host in ("peer2", "peer3")}, in_star=["peer2"])
def test_room_that_is_made_meanwhile_ends_the_waiting(run_story: Any, freed: str) -> None:
    async def learn_round_trips(world: Any) -> None:
        """Let the client know both replicas, and that peer3 is far away."""
        for source, target in (("client", "peer3"), ("peer3", "client")):
            world.network.set_link(source, target, Link(delay_seconds=0.05))
        first, second = world.open(), world.open()
        await world.take(first, world.make_turns()[0])
        give_back = await fill_cache(world.peer_on(world.hosts_of(first)[1]), 192)
        await world.take(second, world.make_turns()[0])
        assert {world.hosts_of(first)[1], world.hosts_of(second)[1]} == {"peer2", "peer3"}
        give_back()
        for session in (first, second):
            await session.close()
        for host in ("peer2", "peer3"):
            assert await look_into(world.peer_on(host)).wait_until_empty(30)

    async def story(world: Any) -> None:
        await learn_round_trips(world)
        session, turns = world.open(), world.make_turns()
        give_back = {
            host: await fill_cache(world.peer_on(host), 256) for host in ("peer2", "peer3")
        }

        running = asyncio.create_task(world.take_all(session, turns))
        while not {"peer2", "peer3"} <= world.quarantined_hosts:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        give_back.pop(freed)()

        # Also the dearer one is asked again, although the cheaper one never has room.
        assert_same(await running, world.expect(turns))
        assert world.hosts_of(session)[1] == freed
        for give in give_back.values():
            give()

    # Shorter than a quarantine: it is not the end of one that helps.
    run_story(story, kv_budget_bytes=4 * PAGE_BYTES, failover_timeout_seconds=8.0)


def test_budget_too_small_for_the_session_is_told_at_once(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns(num_rows=3)

        with pytest.raises(CacheFullError, match="KV cache") as error:
            await world.take(world.open(), turns[0])

        assert error.value.retry_after_seconds is None
        turns = world.make_turns(num_rows=2)
        assert_same(await world.take_all(world.open(64), turns), world.expect(turns))

    # An hour: whoever waits for other peers fails by the time limit of a story.
    # One client gets most of three pages: two of them.
    run_story(story, kv_budget_bytes=3 * PAGE_BYTES, failover_timeout_seconds=3600.0)


def test_session_that_may_outgrow_every_peer_is_refused_before_anything_is_computed(
    run_story: Any,
) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns()

        with pytest.raises(CacheFullError, match=r"room for 128 .* with 1, not for 129") as error:
            await world.take(world.open(129), turns[0])

        assert error.value.retry_after_seconds is None
        assert_same(await world.take_all(world.open(128), turns), world.expect(turns))

    run_story(story, kv_budget_bytes=3 * PAGE_BYTES, failover_timeout_seconds=3600.0)


def test_budget_too_small_for_anything_ends_the_swarm_at_its_start(run_story: Any) -> None:
    async def story(world: Any) -> None:
        raise AssertionError("the swarm began")

    with pytest.raises(UsageError, match=r"^--kv-memory 32767 is too small .* use at least 32768 "):
        run_story(story, kv_budget_bytes=PAGE_BYTES - 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]
