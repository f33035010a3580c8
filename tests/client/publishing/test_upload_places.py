"""How many uploads go on at once, on lines and at peers that carry more or less."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from shoal.client.publishing.upload_places import UploadPlaces
from shoal.protocol.net.clock import run_virtual

LARGE = 2**22


@dataclass
class Uploads:
    """Uploads that hold places, one after the other or at once."""

    places: UploadPlaces = field(default_factory=UploadPlaces)
    num_running: int = 0
    begun: list[float] = field(default_factory=list[float])
    most: int = 0

    async def run(self, seconds: float, num_bytes: int = LARGE) -> None:
        async with self.places.hold(num_bytes):
            self.begun.append(asyncio.get_running_loop().time())
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.num_running -= 1


def test_more_and_more_go_on_at_once_on_a_fast_line() -> None:
    async def main() -> None:
        uploads = Uploads()
        await asyncio.gather(*(uploads.run(1.0) for _ in range(60)))
        assert uploads.most == 8
        assert uploads.begun[:6] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]

    run_virtual(main())


def test_two_go_on_at_once_on_a_slow_line() -> None:
    async def main() -> None:
        uploads = Uploads()
        await asyncio.gather(*(uploads.run(19.0) for _ in range(20)))  # 220 kB/s each
        assert uploads.most == 2

    run_virtual(main())


def test_line_that_becomes_slow_carries_fewer() -> None:
    async def main() -> None:
        uploads = Uploads()
        await asyncio.gather(*(uploads.run(1.0) for _ in range(60)))
        await asyncio.gather(*(uploads.run(19.0) for _ in range(8)))
        uploads.most = 0
        await asyncio.gather(*(uploads.run(19.0) for _ in range(8)))
        assert uploads.most < 8
        uploads.most = 0
        await asyncio.gather(*(uploads.run(19.0) for _ in range(8)))
        assert uploads.most == 2

    run_virtual(main())


def test_little_says_nothing_of_the_line() -> None:
    async def main() -> None:
        uploads = Uploads()
        await asyncio.gather(*(uploads.run(1.0, num_bytes=1000) for _ in range(60)))
        assert uploads.most == 8

    run_virtual(main())


def test_one_after_the_other_is_let_in_beside_who_takes_for_ever() -> None:
    async def main() -> None:
        uploads = Uploads()
        slow = [asyncio.create_task(uploads.run(1e6)) for _ in range(30)]
        await asyncio.sleep(1500.0)
        assert uploads.begun == [0.0, 0.0, 20.0, 60.0, 140.0, 300.0, 620.0, 1260.0]
        await asyncio.sleep(1e5 * 20)
        assert uploads.most == 16
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        uploads.begun.clear()
        await asyncio.gather(*(uploads.run(19.0) for _ in range(3)))
        assert len({*uploads.begun}) == 2  # of trials before nothing is left

    run_virtual(main())


def test_who_comes_in_late_goes_on_where_the_others_stand_still() -> None:
    async def main() -> None:
        uploads = Uploads()
        slow = [asyncio.create_task(uploads.run(1e6)) for _ in range(2)]
        fast = [asyncio.create_task(uploads.run(1.0)) for _ in range(20)]
        await asyncio.wait(fast, timeout=60.0)
        assert all(task.done() for task in fast)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)

    run_virtual(main())


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_places_are_left_by_whoever_is_cancelled(seconds: float) -> None:
    async def main() -> None:
        uploads = Uploads()
        tasks = [asyncio.create_task(uploads.run(100.0)) for _ in range(5)]
        await asyncio.sleep(seconds)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)
        uploads.most = 0
        await asyncio.gather(*(uploads.run(19.0) for _ in range(6)))
        assert uploads.most == 2

    run_virtual(main())
