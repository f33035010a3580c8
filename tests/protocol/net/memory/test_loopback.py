"""Trouble on demand: what the loopback network does to its streams, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.errors import UnavailableError
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream

TEN_FRAMES = [bytes([i]) * 1000 for i in range(10)]


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


class Pair:
    """A client host `a` and a host `b` that echoes, with one stream between them."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.network = network
        self.a = LoopbackTransport(network, "a")
        self.b = LoopbackTransport(network, "b")

    async def open_stream(self) -> Stream:
        listener = await self.b.listen("b", 0, echo)
        return await self.a.open_stream(listener.endpoint)


def run(network: LoopbackNetwork, test: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair(network)
        await test(pair)
        await pair.a.close()
        await pair.b.close()
        assert repr(network).startswith("LoopbackNetwork(streams=0, listeners=0")

    run_virtual(main())


def now() -> float:
    return VirtualClock().now()


def test_delay_counts_once_each_way() -> None:
    async def test(pair: Pair) -> None:
        pair.network.set_link("a", "b", Link(delay_seconds=0.03))
        pair.network.set_link("b", "a", Link(delay_seconds=0.01))
        stream = await pair.open_stream()
        assert now() == pytest.approx(0.04)

        await stream.send(b"x")
        assert now() == pytest.approx(0.04)
        await stream.receive()

        assert now() == pytest.approx(0.08)

    run(LoopbackNetwork(), test)


def test_bandwidth_spaces_frames_out_but_not_those_of_another_stream() -> None:
    async def test(pair: Pair) -> None:
        bulk = await pair.open_stream()
        interactive = await pair.open_stream()
        pair.network.set_link("a", "b", Link(bandwidth_bytes_per_second=1e6))
        for _ in range(4):
            await bulk.send(bytes(500_000))

        await interactive.send(b"token")
        await interactive.receive()
        assert now() < 0.001
        times: list[float] = []
        for _ in range(4):
            await bulk.receive()
            times.append(now())

        assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])

    run(LoopbackNetwork(), test)


def test_lost_frames_arrive_late_and_in_order() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.set_link("a", "b", Link(loss_fraction=0.3))

        for frame in TEN_FRAMES:
            await stream.send(frame)

        assert [await stream.receive() for _ in TEN_FRAMES] == TEN_FRAMES
        assert now() >= 0.2

    run(LoopbackNetwork(seed=3), test)


def test_each_retransmission_waits_twice_as_long() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.set_link("a", "b", Link(loss_fraction=0.5))
        waits: list[float] = []
        for _ in range(20):
            sent_at = now()
            await stream.send(b"x")
            await stream.receive()
            waits.append(round(now() - sent_at, 3))

        assert set(waits) <= {0.0, 0.2, 0.6, 1.4, 3.0, 6.2}
        assert {0.0, 0.2, 0.6} <= set(waits)

    run(LoopbackNetwork(seed=3), test)


def test_frame_lost_again_and_again_breaks_the_stream() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.set_link("a", "b", Link(loss_fraction=1.0))

        await stream.send(b"gone")

        with pytest.raises(UnavailableError, match="lost"):
            await stream.receive()

    run(LoopbackNetwork(), test)


def test_same_seed_gives_the_same_course() -> None:
    def measure(seed: int) -> list[float]:
        times: list[float] = []

        async def test(pair: Pair) -> None:
            stream = await pair.open_stream()
            for frame in TEN_FRAMES:
                await stream.send(frame)
                await stream.receive()
                times.append(now())

        run(LoopbackNetwork(seed, Link(delay_seconds=0.01, loss_fraction=0.2)), test)
        return times

    assert measure(5) == measure(5)
    assert measure(5) != measure(6)


def test_partition_holds_frames_until_it_heals() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.partition("a", "b")
        await stream.send(b"patience")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await stream.receive()

        pair.network.heal("b", "a")

        assert await stream.receive() == b"patience"
        assert now() == 20
        await asyncio.sleep(100)
        await stream.send(b"still")
        assert await stream.receive() == b"still"

    run(LoopbackNetwork(), test)


def test_long_partition_breaks_the_streams_across_it_alone() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        listener = await pair.b.listen("b", 0, echo)
        other = await LoopbackTransport(pair.network, "c").open_stream(listener.endpoint)
        pair.network.partition("a", "b")

        with pytest.raises(UnavailableError, match="silent"):
            await stream.receive()

        assert now() == 25
        await other.send(b"fine")
        assert await other.receive() == b"fine"
        await other.close()
        await asyncio.sleep(1)

    run(LoopbackNetwork(), test)


@pytest.mark.parametrize("obstacle", ["partition", "pause"])
def test_dialling_past_an_obstacle_times_out(obstacle: str) -> None:
    async def test(pair: Pair) -> None:
        listener = await pair.b.listen("b", 0, echo)
        if obstacle == "partition":
            pair.network.partition("a", "b")
        else:
            pair.network.pause("b")

        with pytest.raises(UnavailableError, match="2 s"):
            await pair.a.open_stream(listener.endpoint, timeout_seconds=2)
        assert now() == 2

    run(LoopbackNetwork(), test)


def test_kill_breaks_streams_at_once_and_closes_the_door() -> None:
    async def test(pair: Pair) -> None:
        pair.network.set_link("b", "a", Link(delay_seconds=5))
        listener = await pair.b.listen("b", 0, echo)
        stream = await pair.a.open_stream(listener.endpoint, timeout_seconds=10)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        started_at = now()

        pair.network.kill("b")

        with pytest.raises(UnavailableError, match="killed"):
            await waiting
        with pytest.raises(UnavailableError):
            await stream.send(b"x")
        assert now() == started_at
        with pytest.raises(UnavailableError, match="refused"):
            await pair.a.open_stream(listener.endpoint, timeout_seconds=10)
        with pytest.raises(UnavailableError, match="killed"):
            await pair.b.listen("b", 0, echo)

    run(LoopbackNetwork(), test)


def test_revived_host_can_be_dialled_again() -> None:
    async def test(pair: Pair) -> None:
        first = await pair.b.listen("b", 0, echo)
        pair.network.kill("b")

        pair.network.revive("b")
        await LoopbackTransport(pair.network, "b").listen("b", first.endpoint.port, echo)

        stream = await pair.a.open_stream(first.endpoint)
        await stream.send(b"back")
        assert await stream.receive() == b"back"
        pair.network.kill("b")

    run(LoopbackNetwork(), test)


def test_paused_host_receives_nothing_and_loses_nothing() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.pause("b")
        for frame in TEN_FRAMES:
            await stream.send(frame)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await stream.receive()

        pair.network.resume("b")

        assert [await stream.receive() for _ in TEN_FRAMES] == TEN_FRAMES
        assert now() == 1000

    run(LoopbackNetwork(), test)


def test_paused_host_does_not_read_what_had_arrived() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        await stream.send(b"x")
        await asyncio.sleep(1)
        pair.network.pause("a")

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await stream.receive()

    run(LoopbackNetwork(), test)


def test_bytes_in_flight_are_bounded() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.open_stream()
        pair.network.pause("b")
        for _ in range(4):
            await stream.send(bytes(2**20))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await stream.send(b"one more")

    run(LoopbackNetwork(), test)


def test_hosts_have_fingerprints_of_their_own() -> None:
    async def test(pair: Pair) -> None:
        endpoints = [(await pair.b.listen("b", 0, echo)).endpoint for _ in range(2)]
        endpoints.append((await pair.a.listen("a", 0, echo)).endpoint)

        assert len({endpoint.fingerprint for endpoint in endpoints}) == 3
        assert {len(endpoint.fingerprint) for endpoint in endpoints} == {64}

    run(LoopbackNetwork(), test)
