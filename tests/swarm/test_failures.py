"""Sessions over whole swarms in this process while links, peers and clients misbehave.

What must come out is always what one engine computes undisturbed.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.compress import encode_tensor
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    RefusedError,
    RouteError,
    ShoalError,
    UsageError,
)
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.messages import Declined, Gap, Message, Opened, Output, Welcome
from shoal.protocol.net.loopback import Link
from shoal.protocol.tensors import WireCodec, WireDtype, WireTensor

FOUR_HOPS = ((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4))
TURNS_OF_THE_LOOP = range(1, 40, 3)
"""When to disturb a step: these many turns of the event loop after it began."""


TOLERANCE = 2e-5
"""A replay in float32 sums in another order. A wrong cache is off by more than a tenth."""


def assert_same(outputs: list[Tensor], expected: list[Tensor]) -> None:
    assert len(outputs) == len(expected)
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        difference = (output - right).abs().max()
        assert difference < TOLERANCE, f"output {index} is off by {difference}"


async def turn_the_loop(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


# ---- links and hosts


@pytest.mark.parametrize("hop", [0, 1, 2, 3])
@pytest.mark.parametrize("trouble", ["kill", "break_links"])
def test_session_goes_on_after_a_hop_is_lost(run_story: Any, hop: int, trouble: str) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        before = world.hosts_of(session)

        {"kill": world.network.kill, "break_links": world.break_links}[trouble](before[hop])
        outputs += await world.take_all(session, turns[3:])

        after = world.hosts_of(session)
        assert_same(outputs, world.expect(turns))
        assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
        assert after[hop] != before[hop]
        (failover,) = session.failovers
        assert (failover.position, failover.num_replayed_tokens) == (7, 7)
        assert failover.lost.span == session.hops[hop].span
        assert world.quarantined_hosts == {before[hop]}

    run_story(story, spans=FOUR_HOPS)


@pytest.mark.slow
@pytest.mark.parametrize("hop", [0, 1])
def test_host_may_die_at_any_moment_of_a_step(run_story: Any, hop: int) -> None:
    async def story_of(world: Any, num_turns: int) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        host = world.hosts_of(session)[hop]

        running = asyncio.create_task(world.take(session, turns[2]))
        await turn_the_loop(num_turns)
        world.break_links(host)
        outputs.append(await running)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        await world.mend_links(host)

    async def story(world: Any) -> None:
        for num_turns in TURNS_OF_THE_LOOP:
            await story_of(world, num_turns)

    run_story(story)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["pause", "partition"])
def test_silent_peer_is_replaced_without_being_blamed_for_long(
    run_story: Any, trouble: str
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        host = world.hosts_of(session)[1]
        hosts = (host,) if trouble == "pause" else ("client", host)

        getattr(world.network, trouble)(*hosts)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert "did not answer within" in session.failovers[0].reason
        assert host not in world.hosts_of(session)
        assert world.quarantined_hosts == {host}
        getattr(world.network, "resume" if trouble == "pause" else "heal")(*hosts)
        # Who was only silent is used where nobody else is left.
        (other,) = {"peer2", "peer3"} - {host}
        world.network.kill(other)
        again = world.open()
        assert_same(await world.take_all(again, turns), world.expect(turns))
        assert host in world.hosts_of(again)

    run_story(story)


def test_both_hops_lost_between_two_steps_are_both_replaced(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        lost = world.hosts_of(session)

        for host in lost:
            world.network.kill(host)
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert set(lost).isdisjoint(world.hosts_of(session))
        assert len(session.failovers) == 2

    run_story(story)


def test_span_of_a_lost_hop_may_be_served_by_several(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])
        assert world.hosts_of(session) == ["peer0"]  # one hop is cheaper than three

        world.network.kill("peer0")
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert world.hosts_of(session) == ["peer1", "peer2", "peer3"]

    run_story(story, spans=[(0, 4), (0, 1), (1, 3), (3, 4)])


@pytest.mark.slow
def test_session_without_a_route_names_the_blocks_and_goes_on_later(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:3])

        world.break_links("peer2", "peer3")
        for _ in range(2):
            with pytest.raises(RouteError) as error:
                await world.take(session, turns[3])
            assert [str(span) for span in error.value.missing] == ["2:4"]
            assert session.position == 7
        await world.mend_links("peer2", "peer3")
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))

    run_story(story, failover_timeout_seconds=0.3)


@pytest.mark.parametrize("hop", [0, 1])
def test_step_that_moved_rows_and_failed_leaves_the_logs_as_they_were(
    run_story: Any, hop: int
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns(num_rows=3, num_decoded=5)
        turns[2] = replace(turns[2], row_map=(2, 0, 0))
        turns[4] = replace(turns[4], row_map=(1, 2, 0))
        outputs = await world.take_all(session, turns[:4])
        hosts = ("peer0", "peer1") if hop == 0 else ("peer2", "peer3")

        world.break_links(*hosts)
        with pytest.raises(RouteError):
            await world.take(session, turns[4])
        assert session.position == 8
        await world.mend_links(*hosts)
        outputs += await world.take_all(session, turns[4:])

        assert_same(outputs, world.expect(turns))

    run_story(story, failover_timeout_seconds=0.3)


@pytest.mark.parametrize("has_row_map", [False, True])
def test_step_may_be_cancelled_at_any_moment_and_asked_again(
    run_story: Any, has_row_map: bool
) -> None:
    async def story_of(world: Any, num_turns: int) -> None:
        session, turns = world.open(), world.make_turns(num_rows=2)
        if has_row_map:
            turns[2] = replace(turns[2], row_map=(1, 0))
        outputs = await world.take_all(session, turns[:2])

        running = asyncio.create_task(world.take(session, turns[2]))
        await turn_the_loop(num_turns)
        running.cancel()
        await asyncio.wait([running])
        if running.cancelled():
            assert session.position == 6
            outputs.append(await world.take(session, turns[2]))
        else:
            outputs.append(running.result())
        outputs += await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts == set()

    async def story(world: Any) -> None:
        for num_turns in TURNS_OF_THE_LOOP:
            await story_of(world, num_turns)

    run_story(story)


@pytest.mark.parametrize("num_turns", [1, 5, 15, 30])
def test_first_step_may_be_cancelled_while_the_hops_are_opened(
    run_story: Any, num_turns: int
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()

        running = asyncio.create_task(world.take(session, turns[0]))
        await turn_the_loop(num_turns)
        running.cancel()
        await asyncio.wait([running])

        if running.cancelled():
            assert_same(await world.take_all(session, turns), world.expect(turns))

    run_story(story)


def test_rollback_survives_a_failover(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take_all(session, turns[:4])

        session.rollback(6)
        world.network.kill(world.hosts_of(session)[1])
        outputs = await world.take_all(session, turns[3:])

        assert_same(outputs, world.expect([*turns[:2], *turns[3:]])[2:])

    run_story(story)


# ---- peers that answer garbage


def change_tensor(output: Message, hidden: Callable[[WireTensor], WireTensor]) -> Message:
    assert isinstance(output, Output)
    return replace(output, hidden=hidden(output.hidden))


def make_wire(rows: int, tokens: int, width: int, value: float = 0.5) -> WireTensor:
    data = encode_tensor(torch.full((rows, tokens, width), value))
    return WireTensor(WireDtype.FP32, WireCodec.RAW, rows, tokens, width, data)


def fill(value: float) -> Callable[[Message], Message]:
    return lambda output: change_tensor(
        output, lambda old: replace(old, data=make_wire(*old.shape, value).data)
    )


def narrow(old: WireTensor) -> WireTensor:
    data = encode_tensor(torch.zeros(old.shape, dtype=torch.bfloat16))
    return replace(old, dtype=WireDtype.BF16, data=data)


def resize(tokens: int = 0, rows: int = 0, width: int = 0) -> Callable[[Message], Message]:
    def lie(output: Message) -> Message:
        return change_tensor(
            output, lambda old: make_wire(old.rows + rows, old.tokens + tokens, old.width + width)
        )

    return lie


STRANGER = SessionId(b"somebody else's!")
OUTPUT_LIES: dict[str, Callable[[Any], Message | bytes]] = {
    "too many tokens": resize(tokens=1),
    "too many rows": resize(rows=1),
    "too narrow": resize(width=-1),
    "NaN": fill(math.nan),
    "infinity": fill(math.inf),
    "another dtype": lambda output: change_tensor(output, narrow),
    "another session": lambda output: replace(output, session=STRANGER),
    "another sequence": lambda output: replace(output, sequence=output.sequence + 1),
    "an older sequence": lambda output: replace(output, sequence=output.sequence - 1),
    "another message": lambda output: Opened(output.session, output.epoch, 0.0, 0),
    "a lost prefix": lambda output: Gap(output.session, output.epoch, output.sequence, 0),
    "noise": lambda output: bytes(range(200)),
    "nothing": lambda output: b"",
}


@pytest.mark.parametrize("lie", OUTPUT_LIES.values(), ids=OUTPUT_LIES.keys())
@pytest.mark.parametrize("num_turns_before", [0, 3])
def test_peer_that_answers_garbage_is_replaced_and_quarantined(
    run_story: Any, lie: Any, num_turns_before: int
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:num_turns_before])

        world.liar.lie_once(Output, lie)
        outputs += await world.take_all(session, turns[num_turns_before:])

        assert_same(outputs, world.expect(turns))
        assert world.liar.host is not None
        assert world.quarantined_hosts == {world.liar.host}
        assert world.liar.host not in world.hosts_of(session)
        assert len(session.failovers) == 1

    run_story(story)


OPENING_LIES: dict[str, tuple[type[Message], Callable[[Any], Message | bytes]]] = {
    "another peer": (Welcome, lambda old: replace(old, peer_id=old.peer_id[:-1] + "1")),
    "another model": (Welcome, lambda old: replace(old, model_id=ModelId("b" * 32))),
    "no welcome": (Welcome, lambda old: Opened(STRANGER, 1, 0.0, 0)),
    "noise for a welcome": (Welcome, lambda old: b"\xff" * 50),
    "another session": (Opened, lambda old: replace(old, session=STRANGER)),
    "not opened": (Opened, lambda old: Gap(old.session, old.epoch, 0, 0)),
}


@pytest.mark.parametrize(("kind", "lie"), OPENING_LIES.values(), ids=OPENING_LIES.keys())
def test_peer_that_opens_with_garbage_is_passed_over_and_quarantined(
    run_story: Any, kind: Any, lie: Any
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()

        world.liar.lie_once(kind, lie)
        outputs = await world.take_all(session, turns)

        assert_same(outputs, world.expect(turns))
        assert world.quarantined_hosts == {world.liar.host}
        assert world.liar.host not in world.hosts_of(session)
        assert session.failovers == []

    run_story(story)


# ---- the client's own mistakes


def with_value(value: float) -> Tensor:
    hidden = torch.zeros(1, 2, 64)
    hidden[0, 1, 5] = value
    return hidden


MISTAKES: dict[str, tuple[Tensor, tuple[int, ...] | None]] = {
    "NaN": (with_value(math.nan), None),
    "infinity": (with_value(math.inf), None),
    "too wide": (torch.zeros(1, 1, 65), None),
    "too few dimensions": (torch.zeros(1, 64), None),
    "no tokens": (torch.zeros(1, 0, 64), None),
    "another number of rows": (torch.zeros(2, 1, 64), None),
    "whole numbers": (torch.zeros(1, 1, 64, dtype=torch.int64), None),
    "too long": (torch.zeros(1, 60, 64), None),
    "a row map of two": (torch.zeros(1, 1, 64), (0, 0)),
    "a row map beyond": (torch.zeros(1, 1, 64), (1,)),
}


@pytest.mark.parametrize(("hidden", "row_map"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_of_the_client_is_told_and_no_peer_is_blamed(
    run_story: Any, hidden: Tensor, row_map: tuple[int, ...] | None
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(max_tokens=64), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        hosts = world.hosts_of(session)

        with pytest.raises(UsageError):
            await session.step(hidden, row_map)
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        assert world.hosts_of(session) == hosts
        assert session.failovers == []
        assert world.quarantined_hosts == set()

    run_story(story)


def test_session_beyond_the_limit_of_the_model_is_refused_and_no_peer_is_blamed(
    run_story: Any,
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(max_tokens=513), world.make_turns()

        with pytest.raises(RefusedError, match="limit is 512") as error:
            await world.take(session, turns[0])

        assert error.value.code is ErrorCode.TOO_LONG
        assert session.position == 0
        assert world.quarantined_hosts == set()

    run_story(story)


def test_peer_that_blames_sound_values_is_replaced_and_avoided(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])

        world.liar.lie_once(
            Output,
            lambda output: Declined(
                output.session, output.sequence, ErrorCode.BAD_VALUES, "they make blocks overflow"
            ),
        )
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        (failover,) = session.failovers
        assert "overflow" in failover.reason
        assert world.quarantined_hosts == {world.liar.host}

    run_story(story)


def test_closed_session_takes_no_step(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take(session, turns[0])

        await session.close()
        await session.close()

        with pytest.raises(UsageError, match="closed"):
            await world.take(session, turns[1])

    run_story(story)


# ---- full caches

PAGE_BYTES = 64 * 2 * 256
"""64 tokens of one row in the two blocks of a peer, each 2 x 2 heads x 16 numbers of 4 bytes."""


async def fill_cache(peer: Any, num_tokens: int) -> Callable[[], None]:
    """Let somebody else take the memory of so many tokens; return what gives it back."""
    service = peer.service

    def take() -> Any:
        cache = service.engine.open_cache(1, num_tokens, service.engine.span)
        cache.prepare(0, num_tokens)
        return cache

    cache = await service.compute.call(take)
    return lambda: service.compute.post(cache.close)


def test_full_replica_is_passed_over_for_the_other(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns()
        for host, other in (("peer2", "peer3"), ("peer3", "peer2")):
            assert await world.peer_on(host).service.wait_until_empty(30)
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
@pytest.mark.parametrize("freed", ["peer2", "peer3"])
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
            assert await world.peer_on(host).service.wait_until_empty(30)

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
        assert_same(await world.take_all(world.open(), turns), world.expect(turns))

    # An hour: whoever waits for other peers fails by the time limit of a story.
    # One client gets most of three pages: two of them.
    run_story(story, kv_budget_bytes=3 * PAGE_BYTES, failover_timeout_seconds=3600.0)


def test_budget_too_small_for_anything_ends_the_swarm_at_its_start(run_story: Any) -> None:
    async def story(world: Any) -> None:
        raise AssertionError("the swarm began")

    with pytest.raises(CacheFullError, match="32767 bytes free"):
        run_story(story, kv_budget_bytes=PAGE_BYTES - 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


# ---- many at once


def test_sessions_side_by_side_do_not_disturb_each_other(run_story: Any) -> None:
    async def story(world: Any) -> None:
        plans = [world.make_turns(num_rows=rows, prompt_tokens=rows * 4) for rows in (1, 2, 3, 1)]
        sessions = [world.open() for _ in plans]
        started = [
            await world.take(session, plan[0])
            for session, plan in zip(sessions, plans, strict=True)
        ]
        host = world.hosts_of(sessions[0])[1]

        running = [
            asyncio.create_task(world.take_all(session, plan[1:]))
            for session, plan in zip(sessions, plans, strict=True)
        ]
        await turn_the_loop(10)
        world.network.kill(host)
        rest = await asyncio.gather(*running)

        for first, others, plan in zip(started, rest, plans, strict=True):
            assert_same([first, *others], world.expect(plan))

    run_story(story)


def test_client_that_vanishes_leaves_nothing_behind(run_story: Any) -> None:
    async def story(world: Any) -> None:
        turns = world.make_turns()
        for _ in range(3):
            await world.take_all(world.open(), turns)
        running = asyncio.create_task(world.take_all(world.open(), turns))
        await turn_the_loop(10)

        await world.transport.close()

        with pytest.raises(ShoalError):
            await running

    run_story(story, failover_timeout_seconds=0.2)


def test_broken_link_to_nobody_in_use_disturbs_nobody(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        idle = {"peer0", "peer1", "peer2", "peer3"} - set(world.hosts_of(session))

        for host in idle:
            world.network.kill(host)
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        assert session.failovers == []

    run_story(story)
