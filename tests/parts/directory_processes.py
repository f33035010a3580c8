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
from announcements import MODEL, identity_of, make_announcement, sign
from processes import children_of

from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.dht.neighbourhood import Neighbourhood
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress, split_multiaddr
from shoal.protocol.records.announcements import Announcement

CLOCK = SystemClock()
HERE = Path(__file__)


def announce_now(number: int, **changes: Any) -> Announcement:
    """Return what a peer announces whose announcements before were older."""
    now = CLOCK.wall()
    return make_announcement(number, now, **({"sequence": int(now * 1000)} | changes))


def sign_now(number: int, **changes: Any) -> bytes:
    return sign(announce_now(number, **changes), number)


class Directories:
    """Directories of one test in this process; all are closed at its end."""

    def __init__(self) -> None:
        self._joined: list[HivemindDirectory] = []

    async def join(
        self, addresses: Sequence[str] = (), number: int | None = None, **options: Any
    ) -> HivemindDirectory:
        """Join as the peer of a number, or with an identity that nobody has had."""
        identity = None if number is None else identity_of(number)
        directory = await HivemindDirectory.join(
            addresses, identity=identity, clock=CLOCK, **options
        )
        self._joined.append(directory)
        return directory

    async def read(self, addresses: Sequence[str], **options: Any) -> HivemindDirectory:
        return await self.join(addresses, client_mode=True, **options)

    async def close(self) -> None:
        for directory in reversed(self._joined):
            await directory.close()


async def serve(number: int, port: int, initial_peers: list[str]) -> None:
    """Be a peer in a process of its own: announce, print the address, wait to be killed."""
    directory = await HivemindDirectory.join(
        initial_peers, identity=identity_of(number), clock=CLOCK, port=port
    )
    address = directory.addresses[0]
    _, directory_port = split_multiaddr(address)
    await directory.announce(sign_now(number, directory_port=directory_port))
    print(address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class DirectoryProcess:
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


def start(
    peers: contextlib.ExitStack, number: int, *initial_peers: str, port: int = 0
) -> DirectoryProcess:
    peer = DirectoryProcess(number, *initial_peers, port=port)
    peers.callback(peer.close)
    return peer


async def intrude(directory: HivemindDirectory, addresses: Sequence[str]) -> None:
    """Enter the DHT at some addresses, without asking which swarm it is of."""
    peers = [PeerAddress.parse(address) for address in addresses]
    await Neighbourhood(directory._node.dht, directory._access.p2p, peers, None).restore(())


async def read_announcements(swarm: LocalSwarm) -> dict[str, Announcement]:
    """Return what the peers of a local swarm announced last, by their ids."""
    directory = await HivemindDirectory.join(
        swarm.initial_peers, identity=None, clock=CLOCK, client_mode=True
    )
    try:
        found = await directory.lookup(ModelId(swarm.peers[0].facts["model_id"]))
    finally:
        await directory.close()
    return {announcement.peer_id: announcement for announcement in found}


async def look_up(directory: HivemindDirectory) -> set[str]:
    """Return the ids of the peers that are found."""
    return {announcement.peer_id for announcement in await directory.lookup(MODEL)}


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
