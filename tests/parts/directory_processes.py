"""Peers that announce themselves in a DHT, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import warm_python
from processes import children_of

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.dht.neighbourhood import Neighbourhood
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress, split_multiaddr
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span

MODEL = ModelId("a" * 32)
CLOCK = SystemClock()
HERE = Path(__file__)


def identity_of(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


def make_announcement(number: int, **changes: Any) -> Announcement:
    now = CLOCK.wall()
    fields: dict[str, Any] = {
        "peer_id": identity_of(number).peer_id,
        "model_id": MODEL,
        "num_blocks": 8,
        "span": Span(0, 4),
        "state": PeerState.ONLINE,
        "endpoints": (Endpoint("127.0.0.1", 4000, "c" * 64),),
        "min_version": 1,
        "max_version": 1,
        "weights": "int8",
        "compute_dtype": "fp32",
        "sequence": int(now * 1000),
        "issued_at": now,
        "expires_at": now + 90,
    }
    return Announcement(**(fields | changes))


def sign(announcement: Announcement, number: int) -> bytes:
    return sign_announcement(identity_of(number), announcement)


async def serve(number: int, port: int, initial_peers: list[str]) -> None:
    """Be a peer in a process of its own: announce, print the address, wait to be killed."""
    directory = await HivemindDirectory.join(
        initial_peers, identity=identity_of(number), clock=CLOCK, port=port
    )
    address = directory.addresses[0]
    _, relay_port = split_multiaddr(address)
    await directory.announce(sign(make_announcement(number, relay_port=relay_port), number))
    print(address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class Peer:
    """A process that runs `serve`."""

    def __init__(self, number: int, *initial_peers: str, port: int = 0) -> None:
        self._process = warm_python.Popen(
            # Without -P: this file needs those beside it.
            [sys.executable, str(HERE), str(number), str(port), *initial_peers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peer_id = identity_of(number).peer_id
        self._address = ""

    @property
    def address(self) -> str:
        """Where to join through it; waits until it has announced."""
        if not self._address:
            assert self._process.stdout is not None
            self._address = self._process.stdout.readline().strip()
        return self._address

    @property
    def p2pd(self) -> int:
        assert self.address
        (child,) = children_of(self._process.pid)
        return child

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def start(peers: contextlib.ExitStack, number: int, *initial_peers: str, port: int = 0) -> Peer:
    peer = Peer(number, *initial_peers, port=port)
    peers.callback(peer.close)
    return peer


async def intrude(directory: HivemindDirectory, addresses: Sequence[str]) -> None:
    """Enter the DHT at some addresses, without asking which swarm it is of."""
    peers = [PeerAddress.parse(address) for address in addresses]
    await Neighbourhood(directory._node, directory._p2p, peers).restore()


async def look_up(directory: HivemindDirectory) -> set[str]:
    """Return the ids of the peers that are found."""
    return {announcement.peer_id for announcement in await directory.lookup(MODEL)}


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
