"""Trouble on demand: what the loopback network does to its streams, on virtual time."""

import asyncio
from collections.abc import Iterator

import pytest
from async_tests import RunAsync
from transport_seam import echo
from virtual_time import VirtualClock

from shoal.protocol.errors import UnavailableError
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Stream

TEN_FRAMES = [bytes([i]) * 1000 for i in range(10)]


class Pair:
    """A client host `a` and a host `b` that echoes."""

    def __init__(self, seed: int = 3, link: Link | None = None) -> None:
        self.network = LoopbackNetwork(seed, link or Link())
        self.a = LoopbackTransport(self.network, "a")
        self.b = LoopbackTransport(self.network, "b")

    async def open_stream(self) -> Stream:
        listener = await self.b.listen("b", 0, echo)
        return await self.a.open_stream(listener.endpoint)

    async def close(self) -> None:
        await self.a.close()
        await self.b.close()
        assert repr(self.network).startswith("LoopbackNetwork(streams=0, listeners=0")


@pytest.fixture
def pair(run_async: RunAsync) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    run_async(pair.close())


def now() -> float:
    return VirtualClock().now()


async def test_delay_counts_once_each_way(pair: Pair) -> None:
    pair.network.set_link("a", "b", Link(delay_seconds=0.03))
    pair.network.set_link("b", "a", Link(delay_seconds=0.01))
    stream = await pair.open_stream()
    assert now() == pytest.approx(0.04)

    await stream.send(b"x")
    assert now() == pytest.approx(0.04)
    await stream.receive()

    assert now() == pytest.approx(0.08)


async def test_bandwidth_spaces_frames_out_but_not_those_of_another_stream(pair: Pair) -> None:
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


async def test_lost_frames_arrive_late_and_in_order(pair: Pair) -> None:
    stream = await pair.open_stream()
    pair.network.set_link("a", "b", Link(loss_fraction=0.3))

    for frame in TEN_FRAMES:
        await stream.send(frame)

    assert [await stream.receive() for _ in TEN_FRAMES] == TEN_FRAMES
    assert now() >= 0.2


async def test_each_retransmission_waits_twice_as_long(pair: Pair) -> None:
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


async def test_frame_lost_again_and_again_breaks_the_stream(pair: Pair) -> None:
    stream = await pair.open_stream()
    pair.network.set_link("a", "b", Link(loss_fraction=1.0))

    await stream.send(b"gone")

    with pytest.raises(UnavailableError, match="lost"):
        await stream.receive()


async def test_same_seed_gives_the_same_course() -> None:
    async def measure(seed: int) -> list[float]:
        pair = Pair(seed, Link(delay_seconds=0.01, loss_fraction=0.2))
        started_at, times = now(), list[float]()
        stream = await pair.open_stream()
        for frame in TEN_FRAMES:
            await stream.send(frame)
            await stream.receive()
            times.append(now() - started_at)
        await pair.close()
        return times

    course = await measure(5)
    assert await measure(5) == pytest.approx(course)
    assert await measure(6) != pytest.approx(course)


async def test_partition_holds_frames_until_it_heals(pair: Pair) -> None:
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


async def test_long_partition_breaks_the_streams_across_it_alone(pair: Pair) -> None:
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


@pytest.mark.parametrize("obstacle", ["partition", "pause"])
async def test_dialling_past_an_obstacle_times_out(obstacle: str, pair: Pair) -> None:
    listener = await pair.b.listen("b", 0, echo)
    if obstacle == "partition":
        pair.network.partition("a", "b")
    else:
        pair.network.pause("b")

    with pytest.raises(UnavailableError, match="2 s"):
        await pair.a.open_stream(listener.endpoint, timeout_seconds=2)
    assert now() == 2


async def test_kill_breaks_streams_at_once_and_closes_the_door(pair: Pair) -> None:
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


async def test_revived_host_can_be_dialled_again(pair: Pair) -> None:
    first = await pair.b.listen("b", 0, echo)
    pair.network.kill("b")

    pair.network.revive("b")
    await LoopbackTransport(pair.network, "b").listen("b", first.endpoint.port, echo)

    stream = await pair.a.open_stream(first.endpoint)
    await stream.send(b"back")
    assert await stream.receive() == b"back"
    pair.network.kill("b")


async def test_paused_host_receives_nothing_and_loses_nothing(pair: Pair) -> None:
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


async def test_paused_host_does_not_read_what_had_arrived(pair: Pair) -> None:
    stream = await pair.open_stream()
    await stream.send(b"x")
    await asyncio.sleep(1)
    pair.network.pause("a")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await stream.receive()


async def test_bytes_in_flight_are_bounded(pair: Pair) -> None:
    stream = await pair.open_stream()
    pair.network.pause("b")
    for _ in range(4):
        await stream.send(bytes(2**20))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await stream.send(b"one more")


async def test_hosts_have_fingerprints_of_their_own(pair: Pair) -> None:
    endpoints = [(await pair.b.listen("b", 0, echo)).endpoint for _ in range(2)]
    endpoints.append((await pair.a.listen("a", 0, echo)).endpoint)

    assert len({endpoint.fingerprint for endpoint in endpoints}) == 3
    assert {len(endpoint.fingerprint) for endpoint in endpoints} == {64}
