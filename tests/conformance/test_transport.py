"""What every transport promises, whatever carries the frames."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from transport_seam import Seam, echo, expect_unavailable, send_all

from shoal.protocol.errors import (
    ErrorCode,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    UsageError,
)
from shoal.protocol.limits import MAX_FRAME_BYTES, MAX_PIECE_BYTES, MAX_SMALL_FRAME_BYTES
from shoal.protocol.net.transport import Stream

SIZES = [0, 1, 16 * 2**10, 5 * 2**20]


async def test_frames_of_all_sizes_come_back_in_order(seam: Seam) -> None:
    listener = await seam.listen(echo)
    stream = await seam.transport("client").open_stream(listener.endpoint)
    frames = [bytes([i % 251]) * size for i, size in enumerate(SIZES * 5)]

    async with asyncio.TaskGroup() as group:
        group.create_task(send_all(stream, frames))
        received = [await stream.receive() for _ in frames]

    assert received == frames
    await stream.close()


async def test_both_ends_know_the_host_at_the_other(seam: Seam) -> None:
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


async def test_frame_at_the_limit_passes_and_beyond_it_is_refused_here(seam: Seam) -> None:
    listener = await seam.listen(echo)
    stream = await seam.transport("client").open_stream(listener.endpoint)

    with pytest.raises(LocalProtocolError):
        await stream.send(bytes(MAX_FRAME_BYTES + 1))

    await stream.send(bytes(MAX_FRAME_BYTES))
    assert await stream.receive() == bytes(MAX_FRAME_BYTES)
    await stream.close()


async def test_gate_lets_large_frames_in_and_is_not_asked_about_others(seam: Seam) -> None:
    asked: list[int] = []

    @asynccontextmanager
    async def gate(num_bytes: int) -> AsyncGenerator[None]:
        asked.append(num_bytes)
        yield

    async def serve(stream: Stream) -> None:
        stream.set_gate(gate)
        await echo(stream)

    listener = await seam.listen(serve)
    stream = await seam.transport("client").open_stream(listener.endpoint)
    sizes = (MAX_SMALL_FRAME_BYTES, MAX_SMALL_FRAME_BYTES + 1, MAX_PIECE_BYTES, 5, MAX_FRAME_BYTES)
    for size in sizes:
        await stream.send(bytes(size))
        assert await stream.receive() == bytes(size)

    assert asked == [MAX_SMALL_FRAME_BYTES + 1, MAX_PIECE_BYTES, MAX_FRAME_BYTES]
    await stream.close()


async def test_sender_of_a_frame_that_the_gate_refuses_still_hears_an_answer(seam: Seam) -> None:
    @asynccontextmanager
    async def gate(num_bytes: int) -> AsyncGenerator[None]:
        raise RefusedError(ErrorCode.BUSY, "no room")
        yield

    async def serve(stream: Stream) -> None:
        stream.set_gate(gate)
        for _ in range(2):
            with pytest.raises(RefusedError):
                await stream.receive()
        await stream.send(b"no room")

    listener = await seam.listen(serve)
    stream = await seam.transport("client").open_stream(listener.endpoint)
    await stream.send(bytes(MAX_FRAME_BYTES))

    assert await stream.receive() == b"no room"
    assert await stream.receive() is None
    await stream.close()


async def test_end_of_a_stream_is_told_to_who_neither_sends_nor_receives(seam: Seam) -> None:
    is_over = asyncio.Event()

    async def serve(stream: Stream) -> None:
        await stream.wait_over()
        await expect_unavailable(stream.receive())
        is_over.set()

    listener = await seam.listen(serve)
    closing, staying = seam.transport("client"), seam.transport("client")
    stream = await closing.open_stream(listener.endpoint)
    mine = await staying.open_stream((await seam.listen(echo)).endpoint)
    waiting = asyncio.create_task(mine.wait_over())
    await asyncio.sleep(0.01)
    assert not is_over.is_set()
    assert not waiting.done()

    await closing.close()
    await mine.close()

    async with asyncio.timeout(5):
        await is_over.wait()
        await waiting
        await stream.wait_over()


async def test_concurrent_streams_do_not_mix(seam: Seam) -> None:
    listener = await seam.listen(echo)
    client = seam.transport("client")

    async def talk(number: int) -> None:
        stream = await client.open_stream(listener.endpoint)
        for turn in range(20):
            frame = f"{number}/{turn}".encode()
            await stream.send(frame)
            assert await stream.receive() == frame
        await stream.close()

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(talk(number))


async def test_cancelled_receive_loses_nothing(seam: Seam) -> None:
    listener = await seam.listen(echo)
    stream = await seam.transport("client").open_stream(listener.endpoint)

    for turn in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.receive()
        await stream.send(bytes([turn]))
        assert await stream.receive() == bytes([turn])
    await stream.close()


async def test_send_waits_for_a_slow_reader_and_breaks_when_cancelled(seam: Seam) -> None:
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


async def test_dialling_nobody_is_unavailable(seam: Seam) -> None:
    listener = await seam.listen(echo)
    await listener.close()

    await expect_unavailable(seam.transport("client").open_stream(listener.endpoint))


async def test_new_listener_on_the_old_port_is_reached(seam: Seam) -> None:
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


async def test_wrong_fingerprint_is_the_fault_of_the_other_end(seam: Seam) -> None:
    served: list[Stream] = []

    async def note(stream: Stream) -> None:
        served.append(stream)

    listener = await seam.listen(note)
    wrong = seam.misname(listener.endpoint)

    with pytest.raises(RemoteProtocolError):
        await seam.transport("client").open_stream(wrong)
    assert served == []


async def test_port_in_use_is_named(seam: Seam) -> None:
    listener = await seam.listen(echo)
    port = listener.endpoint.port

    with pytest.raises(UsageError, match=str(port)):
        await seam.transport().listen(seam.host(), port, echo)


async def test_foreign_address_cannot_be_listened_on(seam: Seam) -> None:
    with pytest.raises(UsageError):
        await seam.transport().listen("192.0.2.1", 0, echo)
