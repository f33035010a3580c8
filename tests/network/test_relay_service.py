"""Which of the two relay services of p2pd serves, and that it is the one which carries texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from async_tests import RunAsync

from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.net.libp2p.multiaddrs import split_multiaddr

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("shipped_p2pd"),
]


class Starts:
    """Starts relays on loopback, where p2pd is none unless told so."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    async def start_with_limits_of_libp2p(self) -> Any:
        """Not reachable as far as it knows, p2pd sets up only the service that it always does."""
        return await self._start()

    async def start_without(self) -> Any:
        return await self._start(is_relay=False)

    async def start_public(self) -> Any:
        return await self._start(force_reachability="public")

    async def _start(self, *, is_relay: bool = True, **options: Any) -> Any:
        from shoal.protocol.net.libp2p import p2p_daemon

        p2p = await p2p_daemon.OwnGroupP2P.create(
            nat_port_map=False, auto_nat=False, use_relay=is_relay, **options
        )
        self.started.append(p2p)
        return p2p

    def list_running(self) -> list[Any]:
        from shoal.protocol.net.libp2p.p2p_daemon import child_of

        return [p2p for p2p in self.started if child_of(p2p).returncode is None]

    async def stop(self) -> None:
        from shoal.protocol.net.libp2p.p2p_daemon import stop_p2pd

        for p2p in self.list_running():
            await stop_p2pd(p2p)


@pytest.fixture
def starts(run_async: RunAsync) -> Iterator[Starts]:
    starts = Starts()
    yield starts
    run_async(starts.stop())


async def test_relay_is_started_anew_until_it_carries_texts_and_kept_then(starts: Starts) -> None:
    from shoal.protocol.net.relays.circuit import is_sufficient_relay, start_sufficient_relay

    poor = await starts.start_with_limits_of_libp2p()
    assert not await is_sufficient_relay(poor)

    relay = await start_sufficient_relay(poor, starts.start_public)

    assert relay is not None
    assert relay is starts.started[-1] is not poor
    assert await is_sufficient_relay(relay)
    assert starts.list_running() == [relay]
    assert await start_sufficient_relay(relay, starts.start_public) is relay
    assert starts.started[-1] is relay


async def test_none_is_left_when_no_start_is_right(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shoal.protocol.net.relays import circuit

    monkeypatch.setattr(circuit, "MAX_STARTS", 2)
    poor = await starts.start_with_limits_of_libp2p()

    found = await circuit.start_sufficient_relay(poor, starts.start_with_limits_of_libp2p)

    assert found is None
    assert len(starts.started) == 3
    assert starts.list_running() == []
    assert all(record.levelname != "WARNING" for record in caplog.records)


@pytest.mark.parametrize(
    ("scope", "host", "is_relay"),
    [
        ("internet", "0.0.0.0", True),
        ("network", "0.0.0.0", True),
        ("unknown", "0.0.0.0", True),
        ("inside", "0.0.0.0", False),
        ("nobody", "0.0.0.0", False),
        ("unknown", "127.0.0.1", False),
    ],
)
def test_only_who_can_be_dialled_is_announced_as_a_relay(
    scope: str, host: str, is_relay: bool
) -> None:
    from shoal.protocol.net.dht.access import Access, Place
    from shoal.protocol.net.relays.reach import Reach, Scope

    place = Place(None, (host, 4001), (Endpoint("10.0.0.1", 4002),), is_relay=True)
    unused: Any = None
    access = Access(unused, place, unused, (), (), None, Reach(Scope(scope)))

    assert access.is_relay is is_relay
    assert not access._replace(place=place._replace(is_relay=False)).is_relay


async def test_only_a_relay_that_carries_texts_grants_a_reservation(starts: Starts) -> None:
    from shoal.protocol.ids import PeerId
    from shoal.protocol.net.relays.circuit import RelayReservations, start_sufficient_relay

    poor = await starts.start_with_limits_of_libp2p()
    none = await starts.start_without()
    good = await start_sufficient_relay(await starts.start_public(), starts.start_public)
    asking = RelayReservations(await starts.start_without())
    assert good is not None
    relays = [
        Relay(*split_multiaddr(str((await p2p.get_visible_maddrs())[0])), PeerId(str(p2p.peer_id)))
        for p2p in (poor, none, good)
    ]

    assert await asking.list_granting(relays) == relays[2:]


async def test_none_is_left_running_when_starting_is_interrupted(starts: Starts) -> None:
    from shoal.protocol.net.relays.circuit import start_sufficient_relay

    async def start_late() -> Any:
        p2p = await starts.start_with_limits_of_libp2p()
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        return p2p

    poor = await starts.start_with_limits_of_libp2p()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(start_sufficient_relay(poor, start_late))

    assert starts.list_running() == []
