"""One after the other for each key."""

from __future__ import annotations

import asyncio

from virtual_time import run_virtual

from shoal.client.concurrency.tasks import KeyedSemaphores


def test_key_is_held_by_one_at_a_time_and_gone_after_the_last() -> None:
    async def main() -> None:
        semaphores, order = KeyedSemaphores[str](), list[str]()

        async def hold(name: str, key: str) -> None:
            async with semaphores.hold(key):
                order.append(name)
                await asyncio.sleep(1.0)
                order.append(name)

        holding = [asyncio.create_task(hold(name, key)) for name, key in (("a", "x"), ("b", "x"))]
        await asyncio.sleep(0.5)
        other = asyncio.create_task(hold("c", "y"))
        await asyncio.gather(*holding, other)
        assert order == ["a", "c", "a", "b", "c", "b"]
        assert repr(semaphores) == "<KeyedSemaphores, 0 in use>"

    run_virtual(main())


def test_semaphore_stays_for_whoever_waits_for_it() -> None:
    """A released lock is not locked until the one that waits for it runs."""

    async def main() -> None:
        semaphores, num_holders, most = KeyedSemaphores[str](), 0, 0

        async def hold() -> None:
            nonlocal num_holders, most
            async with semaphores.hold("x"):
                num_holders += 1
                most = max(most, num_holders)
                await asyncio.sleep(1.0)
                num_holders -= 1

        async def hold_twice() -> None:
            await hold()
            await hold()

        first = asyncio.create_task(hold_twice())
        await asyncio.sleep(0.5)
        waiting = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
        await asyncio.gather(first, waiting[1])
        assert (most, repr(semaphores)) == (1, "<KeyedSemaphores, 0 in use>")

    run_virtual(main())
