"""What every transport promises, whatever carries the frames."""

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    UnavailableError,
    UsageError,
)
from shoal.protocol.limits import MAX_FRAME_BYTES
from shoal.protocol.net.clock import run_virtual
from shoal.protocol.net.grpc_transport import GrpcTransport
from shoal.protocol.net.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Lane, Listener, Stream, StreamServer, Transport

SIZES = [0, 1, 16 * 2**10, 5 * 2**20]


class Seam:
    """Makes transports of one kind, runs a test on them, and tidies up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._network = LoopbackNetwork(seed=1)
        self._transports: list[Transport] = []
        self._complaints: list[dict[str, Any]] = []

    def transport(self, host: str = "server") -> Transport:
        if self.name == "loopback":
            made: Transport = LoopbackTransport(self._network, host)
        else:
            made = GrpcTransport(plaintext=self.name == "grpc-plain")
        self._transports.append(made)
        return made

    def host(self) -> str:
        return "server" if self.name == "loopback" else "127.0.0.1"

    async def listen(self, serve: StreamServer) -> Listener:
        return await self.transport().listen(self.host(), 0, serve)

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test; nothing may be left behind that asyncio has to complain about."""
        run: Callable[[Coroutine[Any, Any, None]], None] = (
            run_virtual if self.name == "loopback" else asyncio.run
        )
        run(self._run(test))
        gc.collect()
        assert self._complaints == []

    async def _run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._complaints.append(context))
        try:
            async with asyncio.timeout(60):
                await test()
        finally:
            for transport in self._transports:
                await transport.close()
        await wait_until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.fixture(
    params=[
        "loopback",
        pytest.param("grpc-tls", marks=pytest.mark.network),
        pytest.param("grpc-plain", marks=pytest.mark.network),
    ]
)
def seam(request: pytest.FixtureRequest) -> Seam:
    return Seam(request.param)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for what happens behind the seam, where no event says so."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


async def expect_unavailable(awaitable: Awaitable[object]) -> None:
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(5):
            await awaitable


def watch() -> tuple[asyncio.Future[object], StreamServer]:
    """Return a server that only receives, and the future of how its last receive ended."""
    outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def serve(stream: Stream) -> None:
        try:
            while await stream.receive() is not None:
                pass
            outcome.set_result(None)
        except UnavailableError as error:
            outcome.set_result(error)

    return outcome, serve


def test_frames_of_all_sizes_come_back_in_order(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        stream = await seam.transport("client").open_stream(listener.endpoint)
        frames = [bytes([i % 251]) * size for i, size in enumerate(SIZES * 5)]

        async with asyncio.TaskGroup() as group:
            group.create_task(send_all(stream, frames))
            received = [await stream.receive() for _ in frames]

        assert received == frames
        await stream.close()

    seam.run(test)


def test_both_ends_know_the_host_at_the_other(seam: Seam) -> None:
    async def test() -> None:
        hosts: list[str | None] = []

        async def note(stream: Stream) -> None:
            hosts.append(stream.remote_host)

        listener = await seam.listen(note)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        assert await stream.receive() is None
        assert stream.remote_host == listener.endpoint.host
        assert hosts == ["client" if seam.name == "loopback" else "127.0.0.1"]
        await stream.close()
        assert stream.remote_host == listener.endpoint.host

    seam.run(test)


async def send_all(stream: Stream, frames: list[bytes]) -> None:
    for frame in frames:
        await stream.send(frame)


def test_frame_at_the_limit_passes_and_beyond_it_is_refused_here(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        with pytest.raises(LocalProtocolError):
            await stream.send(bytes(MAX_FRAME_BYTES + 1))

        await stream.send(bytes(MAX_FRAME_BYTES))
        assert await stream.receive() == bytes(MAX_FRAME_BYTES)
        await stream.close()

    seam.run(test)


def test_concurrent_streams_do_not_mix(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        client = seam.transport("client")

        async def talk(number: int) -> None:
            lane = Lane.BULK if number % 2 else Lane.INTERACTIVE
            stream = await client.open_stream(listener.endpoint, lane)
            for turn in range(20):
                frame = f"{number}/{turn}".encode()
                await stream.send(frame)
                assert await stream.receive() == frame
            await stream.close()

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(talk(number))

    seam.run(test)


def test_cancelled_receive_loses_nothing(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        for turn in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await stream.receive()
            await stream.send(bytes([turn]))
            assert await stream.receive() == bytes([turn])
        await stream.close()

    seam.run(test)


def test_send_waits_for_a_slow_reader_and_breaks_when_cancelled(seam: Seam) -> None:
    async def test() -> None:
        async def never_read(stream: Stream) -> None:
            await asyncio.Event().wait()

        listener = await seam.listen(never_read)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await send_all(stream, [bytes(2**20)] * 100)

        await expect_unavailable(stream.send(b"more"))
        await expect_unavailable(stream.receive())
        await stream.close()

    seam.run(test)


def test_close_delivers_what_was_sent_and_then_ends_the_other_side(seam: Seam) -> None:
    async def test() -> None:
        frames: list[bytes] = []
        ended = asyncio.Event()

        async def collect(stream: Stream) -> None:
            while (frame := await stream.receive()) is not None:
                frames.append(frame)
            assert await stream.receive() is None
            ended.set()

        listener = await seam.listen(collect)
        stream = await seam.transport("client").open_stream(listener.endpoint)
        await send_all(stream, [b"a" * 100_000, b"b"])
        await stream.close()

        async with asyncio.timeout(5):
            await ended.wait()
        assert frames == [b"a" * 100_000, b"b"]

    seam.run(test)


def test_returning_server_delivers_what_it_sent_and_then_ends_the_client(seam: Seam) -> None:
    async def test() -> None:
        async def greet(stream: Stream) -> None:
            await stream.send(b"hello")

        listener = await seam.listen(greet)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        assert await stream.receive() == b"hello"
        assert await stream.receive() is None
        assert await stream.receive() is None
        await expect_unavailable(stream.send(b"too late"))
        await stream.close()

    seam.run(test)


def test_server_may_close_before_it_returns(seam: Seam) -> None:
    async def test() -> None:
        async def close_early(stream: Stream) -> None:
            await stream.close()
            assert await stream.receive() is None
            with pytest.raises(LocalProtocolError):
                await stream.send(b"no")
            await asyncio.Event().wait()

        listener = await seam.listen(close_early)
        stream = await seam.transport("client").open_stream(listener.endpoint)

        async with asyncio.timeout(5):
            assert await stream.receive() is None
        await stream.close()

    seam.run(test)


def test_closed_stream_refuses_sends_and_ends_a_waiting_receive(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        stream = await seam.transport("client").open_stream(listener.endpoint)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.01)

        await stream.close()
        await stream.close()

        async with asyncio.timeout(5):
            assert await waiting is None
        assert await stream.receive() is None
        with pytest.raises(LocalProtocolError):
            await stream.send(b"no")

    seam.run(test)


def test_raising_server_breaks_its_stream_alone(
    seam: Seam, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async def serve(stream: Stream) -> None:
            if await stream.receive() == b"fail":
                raise ZeroDivisionError("as asked")
            await echo(stream)

        listener = await seam.listen(serve)
        client = seam.transport("client")
        victim = await client.open_stream(listener.endpoint)
        other = await client.open_stream(listener.endpoint)
        await victim.send(b"fail")

        await expect_unavailable(victim.receive())
        await victim.close()
        await send_all(other, [b"first", b"second"])
        assert await other.receive() == b"second"
        await other.close()

    with caplog.at_level(logging.ERROR):
        seam.run(test)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_closing_listener_breaks_a_waiting_client_and_is_gone(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        client = seam.transport("client")
        stream = await client.open_stream(listener.endpoint)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.01)

        await listener.close()
        await listener.close()

        await expect_unavailable(waiting)
        await expect_unavailable(stream.send(b"anyone?"))
        await expect_unavailable(client.open_stream(listener.endpoint))
        await stream.close()

    seam.run(test)


def test_closing_listener_with_grace_lets_streams_finish(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        client = seam.transport("client")
        stream = await client.open_stream(listener.endpoint)
        await stream.send(b"before")
        assert await stream.receive() == b"before"
        closing = asyncio.create_task(listener.close(grace_seconds=5))
        await asyncio.sleep(0.01)

        await stream.send(b"within")
        assert await stream.receive() == b"within"
        await expect_unavailable(client.open_stream(listener.endpoint))
        await stream.close()
        async with asyncio.timeout(3):
            await closing

    seam.run(test)


def test_vanishing_client_frees_its_server(seam: Seam) -> None:
    async def test() -> None:
        outcome, serve = watch()
        listener = await seam.listen(serve)
        client = seam.transport("client")
        stream = await client.open_stream(listener.endpoint)
        await stream.send(b"frame")

        await client.close()
        await client.close()

        async with asyncio.timeout(5):
            assert isinstance(await outcome, UnavailableError)
        await expect_unavailable(stream.receive())
        with pytest.raises(LocalProtocolError):
            await client.open_stream(listener.endpoint)

    seam.run(test)


def test_stubborn_server_is_cancelled_when_the_listener_closes(seam: Seam) -> None:
    async def test() -> None:
        cancelled = asyncio.Event()

        async def ignore(stream: Stream) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        listener = await seam.listen(ignore)
        stream = await seam.transport("client").open_stream(listener.endpoint)
        async with asyncio.timeout(5):
            await listener.close()

        assert cancelled.is_set()
        await stream.close()

    seam.run(test)


def test_dialling_nobody_is_unavailable(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        await listener.close()

        await expect_unavailable(seam.transport("client").open_stream(listener.endpoint))

    seam.run(test)


def test_new_listener_on_the_old_port_is_reached(seam: Seam) -> None:
    async def test() -> None:
        server = seam.transport()
        first = await server.listen(seam.host(), 0, echo)
        client = seam.transport("client")
        stream = await client.open_stream(first.endpoint)
        await first.close()
        await expect_unavailable(stream.receive())
        await stream.close()
        await expect_unavailable(client.open_stream(first.endpoint))

        second = await server.listen(seam.host(), first.endpoint.port, echo)

        stream = await client.open_stream(second.endpoint)
        await stream.send(b"again")
        assert await stream.receive() == b"again"
        await stream.close()

    seam.run(test)


def test_wrong_fingerprint_is_the_fault_of_the_other_end(seam: Seam) -> None:
    async def test() -> None:
        served: list[Stream] = []

        async def note(stream: Stream) -> None:
            served.append(stream)

        listener = await seam.listen(note)
        right = listener.endpoint
        wrong = Endpoint(right.host, right.port, "0" * 64)

        with pytest.raises(RemoteProtocolError):
            await seam.transport("client").open_stream(wrong)
        assert served == []

    seam.run(test)


def test_port_in_use_is_named(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        port = listener.endpoint.port

        with pytest.raises(UsageError, match=str(port)):
            await seam.transport().listen(seam.host(), port, echo)

    seam.run(test)


def test_foreign_address_cannot_be_listened_on(seam: Seam) -> None:
    async def test() -> None:
        with pytest.raises(UsageError):
            await seam.transport().listen("192.0.2.1", 0, echo)

    seam.run(test)


def test_closing_a_transport_with_everything_open_does_not_hang(seam: Seam) -> None:
    async def test() -> None:
        outcome, serve = watch()
        transport = seam.transport()
        listener = await transport.listen(seam.host(), 0, serve)
        stream = await transport.open_stream(listener.endpoint)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.01)

        async with asyncio.timeout(5):
            await transport.close()

        await expect_unavailable(waiting)
        assert isinstance(await outcome, UnavailableError)
        await stream.close()

    seam.run(test)


def test_many_streams_leave_no_task_and_no_descriptor(seam: Seam) -> None:
    async def test() -> None:
        listener = await seam.listen(echo)
        client = seam.transport("client")

        async def talk() -> None:
            stream = await client.open_stream(listener.endpoint)
            await stream.send(b"hi")
            assert await stream.receive() == b"hi"
            await stream.close()

        await talk()
        await wait_until(lambda: num_tasks() <= num_tasks_idle)
        num_files = count_files()
        for _ in range(10):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(talk())

        await wait_until(lambda: num_tasks() <= num_tasks_idle)
        await wait_until(lambda: count_files() <= num_files)

    def num_tasks() -> int:
        return len(asyncio.all_tasks())

    # The test itself; a gRPC server waits for its next stream in two tasks of its own.
    num_tasks_idle = 1 if seam.name == "loopback" else 3
    seam.run(test)


def count_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
