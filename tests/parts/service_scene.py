"""A service that listens on a loopback network, and a client's side of its streams, by hand."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from announcements import announce_scripted
from async_tests import Story, make_test
from memory_swarm import MODEL_ID, Inside, MemorySwarm, SceneLoader
from torch import Tensor
from virtual_time import VirtualClock, run_virtual

from shoal.kernels.wire_tensors import DTYPES, decode_tensor, encode_tensor
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.steps import StepWork
from shoal.peer.process.config import PeerConfig
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Declined, Hello, Open, Opened, Output, Step, Welcome
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import FrameGate, Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype, WireTensor

HIDDEN = 64
PEER_ID = Identity(bytes(32)).peer_id
SPAN = Span(1, 3)
IDLE_SECONDS = 600.0
HELLO = Hello(1, 1, "a test")
NOBODYS_NUMBER = 2**16 - 1


class WatchedPool:
    """A pool that calls something before it opens a cache."""

    def __init__(self, pool: Any, before_open: Callable[[], None]) -> None:
        self._pool = pool
        self._before_open = before_open

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def open(self, *arguments: Any) -> Any:
        self._before_open()
        return self._pool.open(*arguments)


class GatedEngine:
    """An engine that stops at a gate, before opening a cache or before computing."""

    def __init__(self, engine: Engine, gate: str) -> None:
        self._engine = engine
        self._gate = gate
        self.num_steps = 0
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def pool(self) -> WatchedPool:
        return WatchedPool(self._engine.pool, lambda: self._wait_at("open"))

    def execute(self, batch: Sequence[StepWork], *arguments: Any) -> list[Tensor | ShoalError]:
        self._wait_at("execute")
        self.num_steps += len(batch)
        return self._engine.execute(batch, *arguments)

    def _wait_at(self, point: str) -> None:
        if point == self._gate:
            self.entered.set()
            assert self.leave.wait(30)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


class FailingEngine:
    """An engine whose next calls of one kind fail with something nobody foresaw."""

    def __init__(self, engine: Engine, point: str, num_failures: int = 1) -> None:
        self._engine = engine
        self._point = point
        self.num_failures = num_failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def pool(self) -> WatchedPool:
        return WatchedPool(self._engine.pool, lambda: self._fail_at("open"))

    def execute(self, batch: Sequence[StepWork], *arguments: Any) -> list[Tensor | ShoalError]:
        self._fail_at("execute")
        return self._engine.execute(batch, *arguments)

    def _fail_at(self, point: str) -> None:
        if point == self._point and self.num_failures:
            self.num_failures -= 1
            raise ZeroDivisionError("the device is on fire")


class Talk:
    """One stream of a client that says whatever it is told to."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def say(self, *messages: Message) -> None:
        for message in messages:
            await self.stream.send(encode_frame(message))

    async def hear(self) -> Message | None:
        frame = await self.stream.receive()
        return None if frame is None else decode_frame(frame)

    async def ask(self, message: Message) -> Message | None:
        await self.say(message)
        return await self.hear()

    async def wait_until_read(self) -> None:
        """Wait until the peer has read what was said: it answers in order."""
        unknown = make_step(1, 0, draw_hidden(0), NOBODYS_NUMBER)
        assert_declined(await self.ask(unknown), ErrorCode.UNKNOWN_SESSION)


class PatientStream:
    """A stream of a client that said something and goes on listening."""

    remote_host: str | None = None

    def __init__(self, *messages: Message) -> None:
        self._frames = [encode_frame(message) for message in messages]

    async def send(self, frame: bytes) -> None:
        return

    def set_gate(self, gate: FrameGate) -> None:
        return

    async def wait_over(self) -> None:
        await asyncio.Future[None]()

    async def receive(self) -> bytes | None:
        return self._frames.pop(0) if self._frames else await asyncio.Future[None]()

    async def close(self) -> None:
        return


class DeafStream(PatientStream):
    """A stream of a client that says something and never reads a word."""

    remote_host = "deaf"

    async def send(self, frame: bytes) -> None:
        await asyncio.Future[None]()


@dataclass
class Peer:
    """A peer that is online, and the network around it."""

    service: Inside
    compute: ComputeThread
    engine: Any
    network: LoopbackNetwork
    client: LoopbackTransport
    clients: list[LoopbackTransport]
    endpoint: Any
    swarm: MemorySwarm

    async def read_directory(self) -> list[Announcement]:
        return await self.swarm.open_directory().lookup(MODEL_ID)

    async def announce(self, identity: Identity, endpoint: Endpoint) -> None:
        """Announce a scripted peer of the same model."""
        directory = self.swarm.open_directory()
        await announce_scripted(directory, VirtualClock(), identity, endpoint)

    async def dial(self) -> Talk:
        return Talk(await self.client.open_stream(self.endpoint))

    def at_host(self, name: str) -> Peer:
        """Return the same peer, as another host of the network sees it."""
        client = LoopbackTransport(self.network, name)
        self.clients.append(client)
        return replace(self, client=client)

    async def greet(self) -> Talk:
        talk = await self.dial()
        assert isinstance(await talk.ask(HELLO), Welcome)
        return talk

    async def open(self, number: int = 1, **changes: Any) -> Talk:
        talk = await self.greet()
        assert isinstance(await talk.ask(make_open(number, **changes)), Opened)
        return talk

    async def wait_until_empty(self) -> None:
        """Wait until nothing of any session is left, and check that that is true."""
        assert await self.service.wait_until_empty(60)
        assert not self.service.admission.num_waiting
        while self.service.admission.num_opening:  # noqa: ASYNC110 - a test on virtual time
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        pool = self.engine.pool
        await self.compute.call(bool)  # behind what is to be closed
        assert (pool.used_bytes, pool.num_sessions) == (0, 0)
        await self.compute.call(self.engine.pool.check_integrity)

    async def count_used_bytes(self) -> int:
        return await self.compute.call(lambda: self.engine.pool.used_bytes)


def make_session(number: int) -> SessionId:
    return SessionId(bytes([number % 256, number // 256]) + b"-a-test-session"[:14])


def make_open(number: int = 1, **changes: Any) -> Open:
    opening = Open(make_session(number), 1, MODEL_ID, SPAN, 1, 100, WireDtype.FP32)
    return replace(opening, **changes)


def draw_hidden(seed: int, num_rows: int = 1, num_tokens: int = 1, width: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_tokens, width, generator=generator)


def make_step(
    sequence: int, position: int, hidden: Tensor, number: int = 1, **changes: Any
) -> Step:
    rows, tokens, width = hidden.shape
    data = encode_tensor(hidden)
    wire = WireTensor(WireDtype.FP32, rows, tokens, width, data)
    return replace(Step(make_session(number), 1, sequence, position, wire), **changes)


def expect_output(answer: Message | None) -> Tensor:
    assert isinstance(answer, Output), answer
    tensor = answer.hidden
    return decode_tensor(tensor.data, DTYPES[tensor.dtype.name], tensor.shape)


def assert_declined(answer: Message | None, code: ErrorCode) -> Declined:
    assert isinstance(answer, Declined), answer
    assert answer.code is code, answer
    return answer


async def run_service(
    engine: Any,
    test: Callable[[Peer], Awaitable[None]],
    max_sessions: int = 8,
    idle_seconds: float = IDLE_SECONDS,
    *,
    is_relayed: bool = False,
) -> None:
    """Run a test against a fresh service; then nothing of it may be left."""
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    swarm = MemorySwarm()
    config = PeerConfig(
        "", engine.span, max_sessions=max_sessions, session_idle_seconds=idle_seconds,
        drain_seconds=0.0,
    )  # fmt: skip
    loader, identity = SceneLoader.of_engine(engine), Identity(bytes(32))
    async with swarm.serve("peer", config, loader, identity, is_relayed=is_relayed) as service:
        client = LoopbackTransport(swarm.network, "client")
        endpoint = service.endpoint
        peer = Peer(
            service, service.compute, engine, swarm.network, client, [client], endpoint, swarm
        )
        await test(peer)
        for client in peer.clients:
            await client.close()
        await peer.wait_until_empty()
        assert service.pushing.logged.used_bytes == 0
        await service.push_links.close()
        assert service.pending.used_bytes == 0
        assert service.passes.used_bytes == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    assert problems == []
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


def run(engine: Any, test: Callable[[Peer], Awaitable[None]], **options: Any) -> None:
    """Do the same on a loop of its own."""
    run_virtual(run_service(engine, test, **options))


def with_peer(
    *,
    gate: str | None = None,
    fails_at: str | None = None,
    wrap: Callable[[Engine], Any] | None = None,
    **options: Any,
) -> Callable[[Story], Story]:
    """Make a test of a story about a peer, with the options of `run_service`.

    The peer's engine stops at a gate, fails at a point, or is what `wrap` makes of it.
    """

    async def play(test: Story, engine: Engine) -> None:
        if gate is not None:
            await run_service(GatedEngine(engine, gate), test, **options)
        elif fails_at is not None:
            await run_service(FailingEngine(engine, fails_at), test, **options)
        else:
            await run_service(wrap(engine) if wrap else engine, test, **options)

    return lambda story: make_test(story, play, "engine")


def compute_alone(engine: Engine, *parts: Tensor, **options: Any) -> list[Tensor]:
    """Return what the engine makes of some steps in a session of its own."""
    cache = engine.pool.open(parts[0].shape[0], 100, SPAN)
    results: list[Tensor] = []
    for part in parts:
        work = StepWork(cache, cache.length, part, **options)
        (result,) = engine.execute([work])
        assert isinstance(result, Tensor)
        results.append(result)
    cache.close()
    return results
