"""TCP under what only real processes and sockets can do to it."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from raw_connection import dial_raw

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    UnavailableError,
)
from shoal.protocol.limits import MAX_FRAME_BYTES
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.tcp import tcp_listener
from shoal.protocol.net.tcp.dial_rules import DialRules
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.tcp.tls import make_server_context, make_tls_identity
from shoal.protocol.net.transport import Stream

pytestmark = pytest.mark.network

ECHO_PROCESS = """
import asyncio
from shoal.protocol.net.tcp.tcp_transport import TcpTransport

async def echo(stream):
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)

async def main():
    listener = await TcpTransport().listen("127.0.0.1", 0, echo)
    print(listener.endpoint.port, listener.endpoint.fingerprint, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


FORGETFUL_PROCESS = """
import asyncio, sys
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.net.tcp.tcp_transport import TcpTransport

async def main():
    endpoint = Endpoint("127.0.0.1", int(sys.argv[1]), sys.argv[2])
    stream = await TcpTransport().open_stream(endpoint)
    await stream.send(b"x")
    print((await stream.receive()).decode(), flush=True)

asyncio.run(main())
"""


async def start_python(script: str, *arguments: str) -> asyncio.subprocess.Process:
    """Start a program in a session of its own.

    Linux continues the stopped processes of a group that has lost the last parent outside of it, as
    other tests' processes may cause in the group of the tests.
    """
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-c",
        script,
        *arguments,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    )


async def echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


@asynccontextmanager
async def echo_process() -> AsyncGenerator[tuple[asyncio.subprocess.Process, Endpoint]]:
    """Run a listener in a process of its own, and kill it in the end."""
    process = await start_python(ECHO_PROCESS)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            port, fingerprint = (await process.stdout.readline()).decode().split()
        yield process, Endpoint("127.0.0.1", int(port), fingerprint)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_process_breaks_its_streams_promptly() -> None:
    client = TcpTransport()
    async with echo_process() as (process, endpoint):
        stream = await client.open_stream(endpoint)
        await stream.send(b"alive")
        assert await stream.receive() == b"alive"
        waiting = asyncio.create_task(stream.receive())

        process.send_signal(signal.SIGKILL)

        with pytest.raises(UnavailableError):
            async with asyncio.timeout(2):
                await waiting
        with pytest.raises(UnavailableError):
            await stream.send(b"anyone?")
        await stream.close()
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(2):
                await client.open_stream(endpoint)
    await client.close()


async def test_stopped_process_is_silent_and_the_callers_timeout_works() -> None:
    client = TcpTransport()
    async with echo_process() as (process, endpoint):
        stream = await client.open_stream(endpoint)
        process.send_signal(signal.SIGSTOP)
        await stream.send(b"hello?")

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await stream.receive()
        with pytest.raises(UnavailableError, match=r"0\.3 s"):
            await client.open_stream(endpoint, timeout_seconds=0.3)

        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            assert await stream.receive() == b"hello?"
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(5):
            await stream.close()
            await client.close()


async def test_random_bytes_on_the_port_disturb_nobody() -> None:
    generator = random.Random(11)

    async def throw(endpoint: Endpoint) -> None:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            writer.write(generator.randbytes(generator.randrange(1, 20_000)))
            await writer.drain()
        except ConnectionError:
            pass  # Being thrown out is fine.
        finally:
            writer.transport.abort()

    transport = TcpTransport()
    endpoint = (await transport.listen("127.0.0.1", 0, echo)).endpoint
    stream = await transport.open_stream(endpoint)
    for turn in range(20):
        await throw(endpoint)
        await stream.send(bytes([turn]))
        assert await stream.receive() == bytes([turn])
    fresh = await transport.open_stream(endpoint)
    await fresh.close()
    await stream.close()
    await transport.close()


async def test_frame_beyond_the_limit_breaks_only_the_strangers_stream() -> None:
    transport = TcpTransport()
    endpoint = (await transport.listen("127.0.0.1", 0, echo)).endpoint
    honest = await transport.open_stream(endpoint)

    async with dial_raw(endpoint) as (reader, writer):
        writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"x" * 1000)
        assert await reader.read() == b""

    await honest.send(b"fine")
    assert await honest.receive() == b"fine"
    await honest.close()
    await transport.close()


@pytest.mark.parametrize("greeting", [b"", b"220 mail.example\r\n", bytes(100), b"\xff" * 8])
async def test_server_of_something_else_is_a_protocol_error(greeting: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "1" * 64)
    transport = TcpTransport()

    with pytest.raises(RemoteProtocolError if greeting else UnavailableError):
        await transport.open_stream(endpoint)
    await transport.close()
    server.close()


async def test_other_certificate_after_a_restart_is_noticed() -> None:
    first = TcpTransport()
    listener = await first.listen("127.0.0.1", 0, echo)
    announced = listener.endpoint
    client = TcpTransport()
    await (await client.open_stream(announced)).close()
    await first.close()
    impostor = TcpTransport()
    await impostor.listen("127.0.0.1", announced.port, echo)

    with pytest.raises(RemoteProtocolError, match="another TLS certificate"):
        await client.open_stream(announced)
    await client.close()
    await impostor.close()


async def test_closing_a_transport_ends_a_dial_in_progress() -> None:
    arrived = asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        writer.close()

    identity = make_tls_identity()
    context = make_server_context(identity)
    silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0, ssl=context)
    port = silent.sockets[0].getsockname()[1]
    endpoint = Endpoint("127.0.0.1", port, identity.fingerprint)
    client = TcpTransport()
    dialling = asyncio.create_task(client.open_stream(endpoint))
    await arrived.wait()

    await client.close()

    with pytest.raises((LocalProtocolError, UnavailableError)):
        async with asyncio.timeout(2):
            await dialling
    silent.close()


async def test_endpoint_without_a_fingerprint_is_not_dialled() -> None:
    with pytest.raises(RemoteProtocolError, match="fingerprint"):
        await TcpTransport().open_stream(Endpoint("192.0.2.1", 1))


async def test_peer_of_the_internet_connects_to_nothing_on_its_own_machine() -> None:
    heard = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += 1
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for own_host, num_heard in (("203.0.113.1", 0), ("127.0.0.1", 1)):
            peer = TcpTransport(rules=DialRules(SystemClock(), [own_host]))
            with pytest.raises(UnavailableError):
                await peer.open_stream(Endpoint("127.0.0.1", port, "a" * 64))
            assert heard == num_heard
            await peer.close()


async def test_endpoint_is_known_to_the_rules_once_a_peer_was_reached_there() -> None:
    class NotingRules(DialRules):
        def note_success(self, allowed: Endpoint) -> None:
            reached.append(allowed)

    reached: list[Endpoint] = []
    server = TcpTransport()
    client = TcpTransport(rules=NotingRules(SystemClock(), ["127.0.0.1"]))
    endpoint = (await server.listen("127.0.0.1", 0, echo)).endpoint

    stream = await client.open_stream(replace(endpoint, host="localhost"))

    assert reached == [endpoint]
    await stream.close()
    await client.close()
    await server.close()


async def test_streams_beyond_the_limit_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "MAX_STREAMS", 4)

    server, client = TcpTransport(), TcpTransport()
    endpoint = (await server.listen("127.0.0.1", 0, echo)).endpoint
    streams = [await client.open_stream(endpoint) for _ in range(3)]

    with pytest.raises(UnavailableError, match="too many streams"):
        await client.open_stream(endpoint)
    await streams.pop().close()
    async with asyncio.timeout(5):
        while True:
            try:
                streams.append(await client.open_stream(endpoint))
                break
            except UnavailableError:
                await asyncio.sleep(0.01)

    for stream in streams:
        await stream.send(b"x")
        assert await stream.receive() == b"x"
    await client.close()
    await server.close()


async def test_silent_strangers_leave_room_for_other_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_listener, "MAX_HANDSHAKES", 4)

    transport = TcpTransport()
    endpoint = (await transport.listen("127.0.0.1", 0, echo)).endpoint

    async def connect(host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", endpoint.port, local_addr=(host, 0))

    silent = [await connect("127.0.0.2") for _ in range(4)]

    async with asyncio.timeout(5):
        assert await silent[-1][0].read() == b""
        stream = await transport.open_stream(endpoint)  # from elsewhere
        await stream.close()
    for _, writer in silent:
        writer.transport.abort()
    await transport.close()


async def test_strangers_who_dial_too_often_wait_for_a_handshake_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_listener, "MAX_CONNECTION_MICROSECONDS", 5000)  # two that are served
    monkeypatch.setattr(tcp_listener, "HELLO_SECONDS", 0.3)

    transport = TcpTransport()
    endpoint = (await transport.listen("127.0.0.1", 0, echo)).endpoint
    async with AsyncExitStack() as held:
        dials = [await dial_from("127.0.0.2", endpoint, held) for _ in range(3)]
        stream = await transport.open_stream(endpoint)

        assert dials == [True, True, False]
        await stream.close()
    await transport.close()


async def dial_from(host: str, endpoint: Endpoint, held: AsyncExitStack) -> bool:
    """Dial from an address; return whether that made a stream, which is held open."""
    try:
        await held.enter_async_context(dial_raw(endpoint, host))
        return True
    except (OSError, asyncio.IncompleteReadError):
        return False


async def test_strangers_who_say_nothing_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "HELLO_SECONDS", 0.2)

    transport = TcpTransport()
    endpoint = (await transport.listen("127.0.0.1", 0, echo)).endpoint
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    async with asyncio.timeout(5):
        await reader.read()
    writer.transport.abort()
    await transport.close()


async def test_client_process_that_exits_without_closing_is_quiet() -> None:
    server = TcpTransport()
    endpoint = (await server.listen("127.0.0.1", 0, echo)).endpoint
    process = await start_python(FORGETFUL_PROCESS, str(endpoint.port), endpoint.fingerprint)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert (out, err, process.returncode) == (b"x\n", b"", 0)
    await server.close()
