"""`HivemindDirectory` losing its p2pd and its nodes, tested with fakes of both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from announcements import MODEL, identity_of, make_announcement, sign
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.membership.membership import NO_MEMBERSHIP
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.dht.known_addresses import KnownAddresses
from shoal.protocol.records.swarm_records import SwarmRecords


async def fail() -> None:
    raise KeyError("nobody thought of this")


def make_node(has_ended: bool) -> Any:
    async def wait() -> int:
        return 1 if has_ended else await asyncio.get_running_loop().create_future()

    return SimpleNamespace(p2pd=SimpleNamespace(wait=wait), close=fail)


class Restarting(HivemindDirectory):
    num_attempts = 0

    async def replace_node(self) -> None:
        self.num_attempts += 1
        if self.num_attempts < 3:
            await fail()
        self._node = make_node(has_ended=False)


def test_addresses_of_those_that_answered_are_kept_before_others(tmp_path: Path) -> None:
    """Anybody may announce hundreds of peers."""

    async def story() -> None:
        known, records = KnownAddresses(tmp_path / "swarm", False), SwarmRecords()
        node = make_node(has_ended=False)
        node.access = SimpleNamespace(
            p2p=SimpleNamespace(peer_id="own"), membership=NO_MEMBERSHIP, peers=()
        )
        answering = {identity_of(number).peer_id for number in range(1, 9)}
        node.neighbourhood = SimpleNamespace(peer_ids=answering)
        directory = HivemindDirectory(node, records, VirtualClock(), known)
        directory._models.add(MODEL)
        now = VirtualClock().wall()
        for number in range(1, 200):
            peer = make_announcement(
                number, endpoints=(Endpoint("198.51.100.7", 4000, "c" * 64),), directory_port=4001,
                issued_at=now, expires_at=now + 90,
            )  # fmt: skip
            records.take(MODEL, records.seal(sign(peer, number)), now)

        directory._keep_addresses(0.0)

        kept = {address.peer_id for address in known.load()[1]}
        assert len(kept) == 32
        assert answering <= kept
        directory._replacing.cancel()

    run_virtual(story())


def test_nodes_are_asked_again_only_when_what_they_told_is_too_old() -> None:
    num_searches = 0

    async def search(_: object) -> bool:
        nonlocal num_searches
        num_searches += 1
        return True

    async def restore(_: object) -> None:
        pass

    async def story() -> None:
        node = make_node(has_ended=False)
        node.p2pd.returncode = None
        node.records = SimpleNamespace(search=search)
        node.neighbourhood = SimpleNamespace(restore=restore)
        directory = HivemindDirectory(node, SwarmRecords(), VirtualClock(), None)
        for max_age_seconds in (30.0, 30.0, 1.0, 0.0):
            await directory.lookup(MODEL, max_age_seconds)
        assert num_searches == 2
        await asyncio.sleep(1.0)
        await directory.lookup(MODEL, 30.0)
        assert num_searches == 2
        await directory.lookup(MODEL, 1.0)
        assert num_searches == 3
        directory._replacing.cancel()

    run_virtual(story())


def test_p2pd_is_started_again_whatever_went_wrong_before() -> None:
    async def story() -> None:
        directory = Restarting(make_node(has_ended=True), SwarmRecords(), VirtualClock(), None)
        await asyncio.sleep(100)

        assert directory.num_attempts == 3
        assert not directory._replacing.done()
        directory._replacing.cancel()

    run_virtual(story())


class EndingAgain(HivemindDirectory):
    """Each p2pd ends a second after its start, but for one that lasts."""

    lasting_seconds = 1.0
    _ended_at = 0.0

    def __init__(self) -> None:
        super().__init__(self._make_node(), SwarmRecords(), VirtualClock(), None)
        self.pauses: list[float] = []

    async def replace_node(self) -> None:
        self.pauses.append(asyncio.get_running_loop().time() - self._ended_at)
        self._node = self._make_node()

    def _make_node(self) -> Any:
        async def wait() -> int:
            await asyncio.sleep(self.lasting_seconds)
            self._ended_at = asyncio.get_running_loop().time()
            return 1

        return SimpleNamespace(p2pd=SimpleNamespace(wait=wait), close=fail)


def test_p2pd_that_ends_again_and_again_is_started_later_and_later() -> None:
    async def story() -> None:
        directory = EndingAgain()
        await asyncio.sleep(300)
        pauses = directory.pauses
        assert 0.5 <= pauses[0] <= 1
        assert all(7.5 <= pause <= 15 for pause in pauses[4:])
        assert len(pauses) >= 300 // 16

        directory.lasting_seconds = 100
        await asyncio.sleep(200)
        assert pauses[-1] <= 1
        directory._replacing.cancel()

    run_virtual(story())
