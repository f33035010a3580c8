"""Strangers attack a real `shoal serve` while an honest client generates text through it.

Whatever comes, the peer answers with a typed refusal or ends that stream, the client's words stay
those of plain transformers, and nothing piles up in the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm import LocalPeer, LocalSwarm
from shoal.protocol import limits
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, UnavailableError
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.messages import Close, Declined, Hello, Message, Open, Opened, Step, Welcome
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.grpc_transport import GrpcTransport
from shoal.protocol.net.hivemind_directory import HivemindDirectory
from shoal.protocol.net.tls import fetch_pinned_certificate, name_in
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireCodec, WireDtype, WireTensor
from shoal.protocol.wire import HEADER_BYTES, decode_frame, encode_frame

pytestmark = [pytest.mark.network, pytest.mark.slow]

SEED = 7
HIDDEN = 64
HELLO = Hello(1, 1, "a stranger")
METHOD = "/shoal.v1.Peer/Exchange"
PATIENCE_SECONDS = 60.0
"""For answers that only a broken peer owes for long."""

ATTACK_SECONDS = 300.0
"""For an attack that a broken peer never lets end; an honest one is through in a few seconds."""

MAX_GROWTH_BYTES = 8 * 2**20
"""What allocators may still keep the third time; the attacks together move hundreds of MiB."""


@dataclass(frozen=True)
class Target:
    """A peer of the whole tiny model, and how strangers find it."""

    process: LocalPeer
    endpoint: Endpoint
    model_id: ModelId
    swarm: LocalSwarm
    tiny: Any

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the peer's process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the peer is gone")


class Stranger:
    """One stream to the peer that carries whatever it is told to."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def say(self, *frames: Message | bytes) -> None:
        """Send frames; that the peer has had enough already is for `hear` to tell."""
        with contextlib.suppress(UnavailableError):
            for frame in frames:
                await self.stream.send(frame if isinstance(frame, bytes) else encode_frame(frame))

    async def hear(self) -> Message | None:
        """Return the next message; None where the stream ended, in whatever manner."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                frame = await self.stream.receive()
        except UnavailableError:
            return None
        return None if frame is None else decode_frame(frame)

    async def ask(self, frame: Message | bytes) -> Message | None:
        await self.say(frame)
        return await self.hear()

    async def expect_end(self, code: ErrorCode) -> None:
        """Expect a refusal of the whole stream and then its end."""
        answer = await self.hear()
        assert isinstance(answer, Declined), answer
        assert (answer.session, answer.code) == (None, code), answer
        assert await self.hear() is None


class Gang:
    """The strangers of one attack: they share one connection and leave together."""

    def __init__(self, target: Target, transport: GrpcTransport) -> None:
        self.target = target
        self._transport = transport

    async def dial(self) -> Stranger:
        return Stranger(await self._transport.open_stream(self.target.endpoint, timeout_seconds=60))

    async def greet(self) -> Stranger:
        stranger = await self.dial()
        assert isinstance(await stranger.ask(HELLO), Welcome)
        return stranger

    def make_open(self, session: SessionId, **changes: Any) -> Open:
        opening = Open(session, 1, self.target.model_id, Span(0, 4), 1, 64, WireDtype.FP32)
        return replace(opening, **changes)

    async def open(self, session: SessionId, **changes: Any) -> Stranger:
        stranger = await self.greet()
        assert isinstance(await stranger.ask(self.make_open(session, **changes)), Opened)
        return stranger


@asynccontextmanager
async def gather_gang(target: Target) -> AsyncGenerator[Gang]:
    transport = GrpcTransport()
    try:
        yield Gang(target, transport)
    finally:
        await transport.close()  # breaks what is still open


_session_numbers = itertools.count(1)


def make_session() -> SessionId:
    """Return an id that was never used: the peer may not have dropped those of who just left."""
    return SessionId(b"hostile" + next(_session_numbers).to_bytes(9, "big"))


def make_step(
    session: SessionId, hidden: Any = None, sequence: int = 1, position: int = 0, **changes: Any
) -> Step:
    hidden = torch.zeros(1, 1, HIDDEN) if hidden is None else hidden
    data = hidden.contiguous().numpy().tobytes()
    rows, tokens, width = hidden.shape
    wire = WireTensor(WireDtype.FP32, WireCodec.RAW, rows, tokens, width, data)
    return replace(Step(session, 1, sequence, position, wire), **changes)


def patch_frame(frame: bytes, offset: int, layout: str, value: int) -> bytes:
    """Write a number into a header; the offsets are those that protocol/wire.py draws."""
    patched = bytearray(frame)
    struct.pack_into("<" + layout, patched, offset, value)
    return bytes(patched)


async def send_random_frames(gang: Gang) -> None:
    rng = random.Random(SEED)
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, 200, 5000, 2**20):
        for greets in (False, True):
            stranger = await (gang.greet() if greets else gang.dial())
            await stranger.say(rng.randbytes(length))
            await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_mutated_frames(gang: Gang) -> None:
    """Flip one byte of a good frame: the peer may understand it or not, but says so."""
    rng = random.Random(SEED)
    for number in range(60):
        session = make_session()
        stranger = await gang.open(session)
        frame = bytearray(encode_frame(make_step(session)))
        frame[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        # Told apart from what is silently dropped (an old sequence, say) by the end that follows.
        await stranger.say(bytes(frame), b"end")
        answers: list[Message] = []
        while (answer := await stranger.hear()) is not None:
            answers.append(answer)
        # None where the peer had ended the stream before the second frame left.
        assert len(answers) <= 2, (number, answers)
        for answer in answers[-1:]:
            assert isinstance(answer, Declined), (number, answers)
            assert answer.code is ErrorCode.BAD_FRAME


async def send_truncated_frames(gang: Gang) -> None:
    session = make_session()
    frame = encode_frame(make_step(session))
    for length in (1, HEADER_BYTES, HEADER_BYTES + 3, len(frame) - 1):
        stranger = await gang.greet()
        await stranger.say(frame[:length])
        await stranger.expect_end(ErrorCode.BAD_FRAME)
    stranger = await gang.greet()
    await stranger.say(frame + b"x")
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_largest_frames(gang: Gang) -> None:
    """As large as the limit allows: garbage first, then a step of a width no model has."""
    stranger = await gang.greet()
    await stranger.say(bytes(limits.MAX_FRAME_BYTES))
    await stranger.expect_end(ErrorCode.BAD_FRAME)
    session = make_session()
    stranger = await gang.open(session)
    for sequence in range(1, 4):
        hidden = torch.zeros(1, 60, limits.MAX_HIDDEN_SIZE)
        answer = await stranger.ask(make_step(session, hidden, sequence))
        assert isinstance(answer, Declined)
        assert answer.session == session


async def send_oversized_frames(gang: Gang) -> None:
    """Beyond the limit our own transport does not go, so this one speaks gRPC by itself."""
    endpoint = gang.target.endpoint
    certificate = await fetch_pinned_certificate(endpoint)
    options = (
        ("grpc.ssl_target_name_override", name_in(certificate)),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    )
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    channel = grpc.aio.secure_channel(str(endpoint), credentials, options=options)
    async with channel:
        for _ in range(3):
            call: Any = channel.stream_stream(METHOD)()
            await call.write(bytes(limits.MAX_FRAME_BYTES + 1))
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call = channel.stream_stream("/shoal.v1.Peer/NoSuchMethod")()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def send_wrong_versions(gang: Gang) -> None:
    stranger = await gang.dial()
    await stranger.say(patch_frame(encode_frame(HELLO), 2, "B", 2))
    await stranger.expect_end(ErrorCode.BAD_FRAME)
    for low, high in ((0, 0), (2, 9), (9, 2), (2**31, 2**32 - 1)):
        stranger = await gang.dial()
        await stranger.say(Hello(low, high, "from elsewhere"))
        await stranger.expect_end(ErrorCode.BAD_VERSION)


async def send_unknown_codes(gang: Gang) -> None:
    """A good step but for one number of the header, whose meaning is not known yet."""
    frame = encode_frame(make_step(make_session()))
    magic, kind, flags, dtype, codec = (0, "B"), (3, "B"), (4, "H"), (6, "B"), (7, "B")
    for offset, layout in (magic, kind, flags, dtype, codec):
        stranger = await gang.greet()
        await stranger.say(patch_frame(frame, offset, layout, 0x80))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def contradict_shapes(gang: Gang) -> None:
    """Every number that says how long something is, too small, too large and enormous."""
    frame = encode_frame(make_step(make_session()))
    for offset in (40, 44, 48, 52, 56):
        for value in (0, 2, 2**16 + 1, 2**31, 2**32 - 1):
            patched = patch_frame(frame, offset, "I", value)
            if patched != frame:
                stranger = await gang.greet()
                await stranger.say(patched)
                await stranger.expect_end(ErrorCode.BAD_FRAME)


async def exceed_shapes(gang: Gang) -> None:
    """Shapes that fit their bytes and the model, and are beyond what anyone may send."""
    shapes = {
        (1, 1, 257 * HIDDEN): (limits.MAX_BATCH_ROWS + 1, 1, HIDDEN),
        (2, 1, 4097 * 8): (1, limits.MAX_STEP_TOKENS + 1, 16),
        (1, 6, 10923): (1, 1, limits.MAX_HIDDEN_SIZE + 2),
    }
    for honest, beyond in shapes.items():
        assert torch.Size(honest).numel() == torch.Size(beyond).numel()
        frame = encode_frame(make_step(make_session(), torch.zeros(honest)))
        for offset, number in zip((40, 44, 48), beyond, strict=True):
            frame = patch_frame(frame, offset, "I", number)
        stranger = await gang.greet()
        await stranger.say(frame)
        await stranger.expect_end(ErrorCode.BAD_FRAME)
    empty = encode_frame(make_step(make_session()))[:HEADER_BYTES]
    stranger = await gang.greet()
    await stranger.say(patch_frame(patch_frame(empty, 44, "I", 0), 56, "I", 0))
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_long_control_parts(gang: Gang) -> None:
    """A field of the future, which a peer skips, but not at any length."""
    frame = encode_frame(make_step(make_session()))
    row_map = b"\x0a\x01\x00"
    control = row_map + b"\x7a\x80\x80\x04" + bytes(2**16)  # field 15, so many bytes
    assert len(control) > limits.MAX_CONTROL_BYTES
    stranger = await gang.greet()
    head = patch_frame(frame[:HEADER_BYTES], 52, "I", len(control))
    await stranger.say(head + control + frame[HEADER_BYTES:])
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_negative_positions(gang: Gang) -> None:
    frame = encode_frame(make_step(make_session()))
    for position in (-1, -(2**31), limits.MAX_SESSION_TOKENS + 1):
        stranger = await gang.greet()
        await stranger.say(patch_frame(frame, 36, "I", position % 2**32))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def step_unknown_sessions(gang: Gang) -> None:
    stranger = await gang.greet()
    for _ in range(200):
        session = make_session()
        await stranger.say(Close(session, 1))
        answer = await stranger.ask(make_step(session))
        assert isinstance(answer, Declined)
        assert (answer.session, answer.code) == (session, ErrorCode.UNKNOWN_SESSION)


async def send_values_that_are_none(gang: Gang) -> None:
    session = make_session()
    stranger = await gang.open(session)
    for sequence, value in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
        answer = await stranger.ask(make_step(session, torch.full((1, 3, HIDDEN), value), sequence))
        assert isinstance(answer, Declined), (value, answer)
        assert (answer.session, answer.code) == (session, ErrorCode.BAD_VALUES)


async def drop_a_thousand_sessions(gang: Gang) -> None:
    """Strangers who fill their streams with sessions, step each once and vanish."""
    num_opened = 0
    while num_opened < 1000:
        async with gather_gang(gang.target) as others:
            for _ in range(8):
                stranger = await others.greet()
                for _ in range(limits.MAX_SESSIONS_PER_STREAM):
                    session = make_session()
                    answer = await stranger.ask(others.make_open(session, num_rows=4))
                    if isinstance(answer, Declined):
                        # The peer may still be busy with those that left.
                        assert answer.code in (ErrorCode.BUSY, ErrorCode.CACHE_FULL), answer
                        continue
                    num_opened += 1
                    await stranger.say(make_step(session, torch.zeros(4, 20, HIDDEN)))


async def never_say_hello(gang: Gang) -> None:
    mute = [await gang.dial() for _ in range(200)]
    for stranger in mute[:50]:
        await stranger.say(make_step(make_session()))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_raw_bytes(gang: Gang) -> None:
    """What is not even TLS, at the same port."""
    rng = random.Random(SEED)
    endpoint = gang.target.endpoint
    greetings = (
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
    )
    for content in (*greetings, *(rng.randbytes(2**size) for size in range(0, 18, 3))):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            writer.write(content)
            async with asyncio.timeout(PATIENCE_SECONDS):
                with contextlib.suppress(OSError):  # an end as well
                    writer.write_eof()
                    await reader.read()
        finally:
            writer.transport.abort()


async def hold_half_open_connections(gang: Gang) -> None:
    """Connect and say nothing, not even the first word of TLS; then go, politely or not."""
    address = (gang.target.endpoint.host, gang.target.endpoint.port)
    silent = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(200)]
    await gang.greet()
    for number, connection in enumerate(silent):
        if number % 2:
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connection.close()


Attack = Callable[[Gang], Awaitable[None]]
ATTACKS: tuple[Attack, ...] = (
    send_random_frames,
    send_mutated_frames,
    send_truncated_frames,
    send_largest_frames,
    send_oversized_frames,
    send_wrong_versions,
    send_unknown_codes,
    contradict_shapes,
    exceed_shapes,
    send_long_control_parts,
    send_negative_positions,
    step_unknown_sessions,
    send_values_that_are_none,
    drop_a_thousand_sessions,
    never_say_hello,
    send_raw_bytes,
    hold_half_open_connections,
)


class HonestClient:
    """Generates text on a thread of its own for as long as the attack lasts."""

    def __init__(self, target: Target) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._prompt = torch.randint(3, 128, (1, 12), generator=generator)
        self._reference = self._generate(target.tiny.reference)
        self._model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            target.tiny.directory, initial_peers=target.swarm.initial_peers
        )

    def run(self, is_over: threading.Event) -> None:
        """Generate at least once, also after the end; every time the reference's words."""
        with self._model as model:
            is_last = False
            while not is_last:
                is_last = is_over.is_set()
                assert torch.equal(self._generate(model), self._reference)

    def _generate(self, model: Any) -> torch.Tensor:
        return model.generate(self._prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)


async def attack(target: Target, attacks: tuple[Attack, ...]) -> None:
    """Carry attacks out beside an honest client, and see that the peer still stands."""
    client = await asyncio.to_thread(HonestClient, target)
    is_over = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(client.run, is_over))
        try:
            for carry_out in attacks:
                async with asyncio.timeout(ATTACK_SECONDS), gather_gang(target) as gang:
                    await carry_out(gang)
        finally:
            is_over.set()
    assert target.process.is_running
    assert "Traceback" not in target.process.log()


async def look_up(swarm: LocalSwarm) -> tuple[Endpoint, ModelId]:
    directory = await HivemindDirectory.join(
        swarm.initial_peers, identity=None, clock=SystemClock(), client_mode=True
    )
    try:
        (announcement,) = await directory.lookup(ModelId(swarm.peers[0].facts["model_id"]))
    finally:
        await directory.close()
    return announcement.endpoints[0], announcement.model_id


@pytest.fixture(scope="module")
def target(tiny_models: Any) -> Iterator[Target]:
    tiny = tiny_models.get("llama")
    with LocalSwarm(tiny.directory, spans=[(0, 4)], weights="fp32") as swarm:
        endpoint, model_id = asyncio.run(look_up(swarm))
        yield Target(swarm.peers[0], endpoint, model_id, swarm, tiny)


@pytest.mark.parametrize("carry_out", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_harms_nobody_else(target: Target, carry_out: Attack) -> None:
    asyncio.run(attack(target, (carry_out,)))


def test_memory_does_not_keep_growing_under_attack(target: Target) -> None:
    """The first round may teach the allocators how much is needed; later ones need no more."""
    memory_bytes: list[int] = []
    for _ in range(3):
        asyncio.run(attack(target, ATTACKS))
        memory_bytes.append(target.memory_bytes)

    assert memory_bytes[2] - memory_bytes[1] < MAX_GROWTH_BYTES, memory_bytes
