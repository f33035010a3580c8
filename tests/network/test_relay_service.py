"""Which of the two relay services of p2pd serves, and that it is the one which carries texts."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_warnings_of_hivemind() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")


class Starts:
    """Starts relays on loopback, where p2pd is none unless told so."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    async def start_with_limits_of_libp2p(self) -> Any:
        """Not reachable as far as it knows, p2pd sets up only the service that it always does."""
        return await self._start()

    async def start_public(self) -> Any:
        return await self._start(force_reachability="public")

    async def _start(self, **options: Any) -> Any:
        from shoal.protocol.net.libp2p import p2p_daemon

        p2p = await p2p_daemon.OwnGroupP2P.create(
            nat_port_map=False, auto_nat=False, use_relay=True, **options
        )
        self.started.append(p2p)
        return p2p

    def count_running(self) -> int:
        from shoal.protocol.net.libp2p.p2p_daemon import child_of

        return sum(child_of(p2p).returncode is None for p2p in self.started)


def run(test: Callable[[Starts], Awaitable[None]]) -> None:
    """Run a test, and end what it started."""
    from shoal.protocol.net.libp2p.p2p_daemon import child_of, stop_p2pd

    async def main() -> None:
        starts = Starts()
        try:
            await test(starts)
        finally:
            for p2p in starts.started:
                if child_of(p2p).returncode is None:
                    await stop_p2pd(p2p)

    asyncio.run(main())


def test_relay_with_the_limits_of_libp2p_carries_no_texts() -> None:
    from shoal.protocol.net.relays.circuit import is_sufficient_relay

    async def test(starts: Starts) -> None:
        assert not await is_sufficient_relay(await starts.start_with_limits_of_libp2p())

    run(test)


def test_relay_is_started_anew_until_it_carries_texts() -> None:
    from shoal.protocol.net.relays.circuit import is_sufficient_relay, start_sufficient_relay

    async def test(starts: Starts) -> None:
        poor = await starts.start_with_limits_of_libp2p()

        relay = await start_sufficient_relay(poor, starts.start_public)

        assert relay is starts.started[-1] is not poor
        assert await is_sufficient_relay(relay)
        assert starts.count_running() == 1

    run(test)


def test_relay_that_carries_texts_is_kept() -> None:
    from shoal.protocol.net.relays.circuit import start_sufficient_relay

    async def test(starts: Starts) -> None:
        poor = await starts.start_with_limits_of_libp2p()
        relay = await start_sufficient_relay(poor, starts.start_public)
        num_started = len(starts.started)

        assert await start_sufficient_relay(relay, starts.start_public) is relay
        assert len(starts.started) == num_started

    run(test)


def test_none_is_left_running_when_starting_is_interrupted() -> None:
    from shoal.protocol.net.relays.circuit import start_sufficient_relay

    async def test(starts: Starts) -> None:
        async def start_late() -> Any:
            p2p = await starts.start_with_limits_of_libp2p()
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            return p2p

        poor = await starts.start_with_limits_of_libp2p()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(start_sufficient_relay(poor, start_late))

        assert starts.count_running() == 0

    run(test)
