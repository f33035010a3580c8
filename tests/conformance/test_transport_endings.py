"""How streams of any transport end: closed, broken, abandoned, all at once."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from transport_seam import Seam, echo, expect_unavailable, send_all, wait_until

from shoal.protocol.errors import LocalProtocolError, UnavailableError
from shoal.protocol.limits import MAX_FRAME_BYTES
from shoal.protocol.net.transport import Stream, StreamServer


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


async def test_close_delivers_what_was_sent_and_then_ends_the_other_side(seam: Seam) -> None:
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


async def test_returning_server_delivers_what_it_sent_and_then_ends_the_client(seam: Seam) -> None:
    async def greet(stream: Stream) -> None:
        await stream.send(b"hello")

    listener = await seam.listen(greet)
    stream = await seam.transport("client").open_stream(listener.endpoint)

    assert await stream.receive() == b"hello"
    assert await stream.receive() is None
    assert await stream.receive() is None
    await expect_unavailable(stream.send(b"too late"))
    await stream.close()


async def test_server_may_close_before_it_returns(seam: Seam) -> None:
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


async def test_closed_stream_refuses_sends_and_ends_a_waiting_receive(seam: Seam) -> None:
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


async def test_raising_server_breaks_its_stream_alone(
    seam: Seam, caplog: pytest.LogCaptureFixture
) -> None:
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
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info is not None for record in errors] == [True]


async def test_closing_listener_breaks_a_waiting_client_and_is_gone(seam: Seam) -> None:
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


async def test_closing_listener_with_grace_lets_streams_finish(seam: Seam) -> None:
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


async def test_vanishing_client_frees_its_server(seam: Seam) -> None:
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


async def test_stubborn_server_is_cancelled_when_the_listener_closes(seam: Seam) -> None:
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


async def test_closing_a_transport_with_everything_open_does_not_hang(seam: Seam) -> None:
    outcome, serve = watch()
    transport = seam.transport()
    listener = await transport.listen(seam.host(), 0, serve)
    other = await seam.transport("client").open_stream(listener.endpoint)
    stream = await transport.open_stream((await seam.listen(echo)).endpoint)
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0.01)

    async with asyncio.timeout(5):
        await transport.close()

    await expect_unavailable(waiting)
    assert isinstance(await outcome, UnavailableError)
    await stream.close()
    await other.close()


async def test_many_streams_leave_no_task_and_no_descriptor(seam: Seam) -> None:
    def num_tasks() -> int:
        return len(asyncio.all_tasks())

    listener = await seam.listen(echo)
    client = seam.transport("client")

    async def talk() -> None:
        stream = await client.open_stream(listener.endpoint)
        await stream.send(b"hi")
        assert await stream.receive() == b"hi"
        await stream.close()

    await talk()
    await wait_until(lambda: num_tasks() <= seam.num_idle_tasks)
    num_files = count_files()
    for _ in range(4):
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(talk())

    await wait_until(lambda: num_tasks() <= seam.num_idle_tasks)
    await wait_until(lambda: count_files() <= num_files)


def count_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


async def test_close_in_the_middle_of_a_send_breaks_the_stream(seam: Seam) -> None:
    """Half of a frame must not be taken for more than that, nor for an end in good order."""

    if seam.name == "loopback":
        pytest.skip("it takes a frame whole or not at all")

    is_closed = asyncio.Event()
    outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def serve(stream: Stream) -> None:
        await is_closed.wait()
        try:
            outcome.set_result(await stream.receive())
        except UnavailableError as error:
            outcome.set_result(error)

    listener = await seam.listen(serve)
    stream = await seam.transport("client").open_stream(listener.endpoint)
    sending = asyncio.create_task(stream.send(bytes(MAX_FRAME_BYTES)))
    await asyncio.sleep(0.05)
    assert not sending.done()

    await stream.close()
    is_closed.set()

    async with asyncio.timeout(10):
        assert isinstance(await outcome, UnavailableError)
        await asyncio.wait({sending})
    with pytest.raises((UnavailableError, LocalProtocolError)):
        await sending
