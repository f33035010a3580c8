"""Which hosts a roll call counts, and which it leaves alone afterwards."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from announcements import make_announcement
from virtual_time import VirtualClock, run_virtual

from shoal.peer.placement.roll_call import RollCall
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import NotDialledError, ShoalError, UnavailableError
from shoal.protocol.net.dialling import dial


class Refusing:
    """A transport that reaches nobody, for the reasons given, by port."""

    def __init__(self, *reasons: type[ShoalError]) -> None:
        self.reasons = reasons

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float) -> Any:
        raise self.reasons[endpoint.port - 1]("there is nobody")


@pytest.mark.parametrize(
    ("reason", "is_absent"), [(UnavailableError, True), (NotDialledError, False)]
)
def test_host_that_we_must_not_dial_does_not_count_and_is_not_to_blame(
    reason: type[ShoalError], is_absent: bool
) -> None:
    async def story() -> None:
        host = make_announcement(endpoints=(Endpoint("198.51.100.7", 1, "c" * 64),))
        transport: Any = Refusing(reason)
        roll_call = RollCall(transport, VirtualClock(), random.Random(1))

        assert await roll_call.call([host], host.span) == {host.peer_id}
        assert roll_call.absent == ({host.peer_id} if is_absent else set())

    run_virtual(story())


def test_peer_is_not_to_blame_where_one_of_its_endpoints_must_not_be_dialled() -> None:
    async def story() -> None:
        transport: Any = Refusing(NotDialledError, UnavailableError)
        endpoints = [Endpoint("198.51.100.7", port, "c" * 64) for port in (1, 2)]
        with pytest.raises(NotDialledError):
            await dial(transport, VirtualClock(), make_announcement().peer_id, endpoints, 1.0)

    run_virtual(story())


class Counting(Refusing):
    """A transport that reaches nobody, and counts who was dialled."""

    def __init__(self) -> None:
        self.dialled: Counter[str] = Counter()

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float) -> Any:
        self.dialled[endpoint.host] += 1
        raise UnavailableError("there is nobody")


def test_host_that_many_made_up_announcements_name_is_dialled_once() -> None:
    async def story() -> None:
        hosts = [
            make_announcement(number, endpoints=(Endpoint(f"host{number}", 1, f"{number:064x}"),))
            for number in range(1, 9)
        ]
        made_up = [
            make_announcement(number, endpoints=hosts[0].endpoints) for number in range(10, 110)
        ]
        transport: Any = Counting()
        roll_call = RollCall(transport, VirtualClock(), random.Random(1))

        uncounted = await roll_call.call([*made_up, *hosts], hosts[0].span)

        assert transport.dialled == {f"host{number}": 1 for number in range(1, 9)}
        assert uncounted == {host.peer_id for host in [*made_up, *hosts]}

    run_virtual(story())
