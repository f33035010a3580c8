"""Whose turn it is, where strangers cost time."""

from __future__ import annotations

import asyncio

from shoal.protocol.fair_share import Tenant
from shoal.protocol.net.turns import Turns

GREEDY = Tenant("attic", "greedy")
OTHER = Tenant("cellar", "other")


def make_turns() -> Turns:
    return Turns(microseconds=500_000, seconds=0.036)


async def spend(turns: Turns, tenant: Tenant, seconds: float) -> float:
    """Take one turn after the other, each of 100 us; return the share of time that they took."""
    loop = asyncio.get_running_loop()
    until, num_turns = loop.time() + seconds, 0
    while loop.time() < until:
        await turns.wait(tenant)
        turns.charge(tenant, 100)
        num_turns += 1
    return num_turns * 100e-6 / seconds


async def test_nobody_waits_who_costs_little() -> None:
    turns = make_turns()

    for _ in range(1000):
        assert not turns.must_wait(OTHER)
        turns.charge(OTHER, 100)
        await asyncio.sleep(0.001)


async def test_a_greedy_client_gets_its_part_and_the_next_one_has_not_to_wait() -> None:
    turns = make_turns()

    assert 0.25 < await spend(turns, GREEDY, 10.0) < 0.29
    turns.charge(GREEDY, 1000)

    assert turns.must_wait(GREEDY)
    assert not turns.must_wait(OTHER)
    assert not turns.must_wait(Tenant(GREEDY.address, "honest"))


async def test_many_greedy_ones_share_and_leave_a_part() -> None:
    turns = make_turns()
    crowd = [Tenant(f"attic {number % 10}", f"greedy {number}") for number in range(100)]

    parts = await asyncio.gather(*(spend(turns, tenant, 10.0) for tenant in crowd))

    assert 0.4 < sum(parts) < 0.51
    by_address = [sum(parts[number::10]) for number in range(10)]
    assert max(by_address) < 1.5 * min(by_address)
    assert not turns.must_wait(OTHER)


async def test_an_address_gets_its_part_however_many_names_it_makes_up() -> None:
    turns = make_turns()
    names = [Tenant("attic", f"name {number}") for number in range(100)]

    assert sum(await asyncio.gather(*(spend(turns, name, 5.0) for name in names))) < 0.4


async def test_turns_come_in_order_to_streams_and_in_alternation_to_clients() -> None:
    turns, order = make_turns(), list[str]()

    async def take(tenant: Tenant, name: str) -> None:
        await turns.wait(tenant)
        turns.charge(tenant, 5_000)
        order.append(name)

    others = [Tenant("attic", name) for name in "abc"]
    for tenant in others:
        turns.charge(tenant, 10_000)
    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            for tenant in others:
                tasks.create_task(take(tenant, f"{tenant.client}{number}"))

    assert order == [f"{name}{number}" for number in range(3) for name in "abc"]


async def test_costs_are_forgotten_and_so_are_those_who_gave_up_waiting() -> None:
    turns = make_turns()
    turns.charge(GREEDY, 10**9)
    waiting = asyncio.create_task(turns.wait(GREEDY))
    await asyncio.sleep(0.1)
    assert not waiting.done()

    waiting.cancel()
    await asyncio.wait({waiting})
    del waiting
    await asyncio.sleep(10.0)

    assert not turns.must_wait(GREEDY)
    assert repr(turns) == "<Turns <RecentCosts of 0 groups, budget 18000>, 0 lines>"
