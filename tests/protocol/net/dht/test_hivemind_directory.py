"""What a directory does about its p2pd and its nodes, without either of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from virtual_time import VirtualClock, run_virtual

from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.records.swarm_records import SwarmRecords


async def fail() -> None:
    raise KeyError("nobody thought of this")


def make_node(has_ended: bool) -> Any:
    async def wait() -> int:
        return 1 if has_ended else await asyncio.get_running_loop().create_future()

    return SimpleNamespace(p2pd=SimpleNamespace(wait=wait), close=fail)


class Restarting(HivemindDirectory):
    num_attempts = 0

    async def _replace(self) -> None:
        self.num_attempts += 1
        if self.num_attempts < 3:
            await fail()
        self._node = make_node(has_ended=False)


def test_p2pd_is_started_again_whatever_went_wrong_before() -> None:
    async def story() -> None:
        directory = Restarting(make_node(has_ended=True), SwarmRecords(), VirtualClock(), None)
        await asyncio.sleep(100)

        assert directory.num_attempts == 3
        assert not directory._replacing.done()
        directory._replacing.cancel()

    run_virtual(story())
