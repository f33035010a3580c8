"""Places that nobody has for long."""

from __future__ import annotations

import asyncio

import pytest

from shoal.client.finetune.places import Places
from shoal.protocol.net.clock import run_virtual


def test_place_is_given_on_when_it_was_held_for_long_or_is_left() -> None:
    async def main() -> None:
        places, begun = Places(2, 3, 60.0), dict[str, float]()
        loop = asyncio.get_running_loop()

        async def hold(name: str, seconds: float) -> None:
            async with places.hold():
                begun[name] = loop.time()
                await asyncio.sleep(seconds)

        slow = [hold(name, 200.0) for name in ("a", "b", "c")]
        await asyncio.gather(*slow, hold("d", 1.0), hold("e", 1.0), hold("f", 1.0))
        # The third comes as soon as a place is free; then there are three in all.
        assert begun == {"a": 0.0, "b": 0.0, "c": 60.0, "d": 200.0, "e": 200.0, "f": 201.0}

    run_virtual(main())


def test_places_are_left_by_whoever_is_cancelled() -> None:
    async def main() -> None:
        places = Places(1, 2, 60.0)

        async def hold() -> None:
            async with places.hold():
                await asyncio.sleep(100.0)

        holding, waiting = [asyncio.create_task(hold()) for _ in range(2)]
        for seconds, task in ((1.0, waiting), (70.0, holding)):
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.wait([task])
        # The first of them had given its place on before: it is free once, not twice.
        first = asyncio.create_task(hold())
        await asyncio.sleep(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0), places.hold():
                raise AssertionError("two at once")
        await first

    run_virtual(main())
