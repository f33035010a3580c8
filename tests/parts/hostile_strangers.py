"""Strangers to a peer, who say whatever they are told to over streams of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, UnavailableError
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Declined, Hello, Open, Opened, Step, Welcome
from shoal.protocol.net.frame_stream import FrameStream
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype, WireTensor

HIDDEN = 64
HELLO = Hello(1, 1, "a stranger")
PATIENCE_SECONDS = 60.0
"""For answers that only a broken peer owes for long."""


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
        """What the peer's process has allocated; pages of files come and go as the kernel likes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


class HostileStranger:
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

    def break_off(self) -> None:
        """Hang up without a word."""
        cast(FrameStream, self.stream).break_off("a stranger hangs up")

    async def expect_end(self, code: ErrorCode) -> None:
        """Expect a refusal of the whole stream and then its end."""
        answer = await self.hear()
        assert isinstance(answer, Declined), answer
        assert (answer.session, answer.code) == (None, code), answer
        assert await self.hear() is None


class Gang:
    """The strangers of one attack: they leave together."""

    def __init__(self, target: Target, transport: TcpTransport) -> None:
        self.target = target
        self._transport = transport

    async def dial(self) -> HostileStranger:
        return HostileStranger(
            await self._transport.open_stream(self.target.endpoint, timeout_seconds=60)
        )

    async def greet(self) -> HostileStranger:
        stranger = await self.dial()
        assert isinstance(await stranger.ask(HELLO), Welcome)
        return stranger

    def make_open(self, session: SessionId, **changes: Any) -> Open:
        opening = Open(session, 1, self.target.model_id, Span(0, 4), 1, 64, WireDtype.FP32)
        return replace(opening, **changes)

    async def open(self, session: SessionId, **changes: Any) -> HostileStranger:
        stranger = await self.greet()
        assert isinstance(await stranger.ask(self.make_open(session, **changes)), Opened)
        return stranger


@asynccontextmanager
async def gather_gang(target: Target) -> AsyncGenerator[Gang]:
    transport = TcpTransport()
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
    wire = WireTensor(WireDtype.FP32, rows, tokens, width, data)
    return replace(Step(session, 1, sequence, position, wire), **changes)


def patch_frame(frame: bytes, offset: int, layout: str, value: int) -> bytes:
    """Write a number into a header; the offsets are those that protocol/messages/codec.py draws."""
    patched = bytearray(frame)
    struct.pack_into("<" + layout, patched, offset, value)
    return bytes(patched)
