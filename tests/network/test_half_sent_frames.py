"""Strangers send nearly all of many large frames to a real `shoal serve`, and then nothing more.

What has arrived of a frame is memory that the peer cannot use. The attacks are written by hand,
since our own transport finishes what it begins.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from directory_processes import read_announcements
from raw_connection import dial_raw

from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol import limits
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.session import Hello, Welcome
from shoal.protocol.net.frame_stream import Framing
from shoal.protocol.net.tcp.tcp_transport import TcpTransport

pytestmark = [pytest.mark.network, pytest.mark.slow]

NUM_STREAMS = 60
HELLO = encode_frame(Hello(1, 1, "a stranger"))
MIB = 2**20


class Target:
    """A peer, where it listens, and how much memory it takes."""

    def __init__(self, swarm: LocalSwarm, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._process = swarm.peers[0]

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the peer's process."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the peer is gone")

    async def expect_service(self) -> None:
        """See that somebody who comes now is served."""
        transport = TcpTransport()
        async with asyncio.timeout(20):
            stream = await transport.open_stream(self.endpoint)
            await stream.send(HELLO)
            answer = await stream.receive()
        assert answer is not None
        assert isinstance(decode_frame(answer), Welcome)
        await transport.close()


@pytest.fixture(scope="module")
def target(tiny_models: Any) -> Iterator[Target]:
    tiny = tiny_models.get("llama")
    with LocalSwarm(tiny.directory, spans=[(0, 4)], weights="fp32") as swarm:
        (found,) = asyncio.run(read_announcements(swarm)).values()
        yield Target(swarm, found.endpoints[0])


async def send_all_but_the_end(target: Target, num_bytes: int) -> int:
    """Send frames of this size from many strangers but for a byte; return what it takes."""
    before = target.memory_bytes
    content = b"".join(Framing().pack(HELLO)) + struct.pack("<I", num_bytes) + bytes(num_bytes - 1)
    async with AsyncExitStack() as strangers:
        writers = [
            (await strangers.enter_async_context(dial_raw(target.endpoint)))[1]
            for _ in range(NUM_STREAMS)
        ]
        for writer in writers:
            writer.write(content)
        await asyncio.wait([asyncio.ensure_future(w.drain()) for w in writers], timeout=10)
        taken = target.memory_bytes - before
        await target.expect_service()
    return taken


def test_frames_of_one_piece_that_stop_before_their_end_take_that_piece(target: Target) -> None:
    taken = asyncio.run(send_all_but_the_end(target, limits.MAX_PIECE_BYTES))

    # The piece, what TLS reads ahead, and what allocators take.
    assert taken < NUM_STREAMS * MIB + 16 * MIB


def test_frames_that_stop_before_their_end_take_what_one_address_may_have(target: Target) -> None:
    taken = asyncio.run(send_all_but_the_end(target, limits.MAX_FRAME_BYTES))

    # A quarter of 512 MiB; those that wait for room hold what TLS reads ahead.
    assert taken < 220 * MIB
