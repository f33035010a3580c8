"""A proxy before every peer, so that links can be cut without touching what they connect.

Who dials cannot be read from what is sent, which is encrypted. So the proxy asks Linux which
process has the other end of a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

PROXY_HOST, PEER_HOST, STRANGER_HOST = "127.0.0.2", "127.0.0.3", "127.0.0.4"
"""Linux takes all of 127.0.0.0/8 for loopback: so a proxy can have the same port as its peer."""

_PIECE_BYTES = 2**16

_T = TypeVar("_T")

FindProcesses = Callable[[], Mapping[int, str]]
"""Returns the names of the processes that may dial, by process id."""


@dataclass(eq=False)
class _Connection:
    """One connection through a proxy; `task` carries its bytes."""

    dialler: str
    target: str
    task: asyncio.Task[None]


class Links:
    """The proxies of all peers, on a loop and a thread of their own. For use in a `with` block."""

    def __init__(self, find_processes: FindProcesses) -> None:
        self._find_processes = find_processes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")
        self._doors: dict[frozenset[str], asyncio.Event] = {}
        self._connections: set[_Connection] = set()
        self._transports = weakref.WeakSet[asyncio.WriteTransport]()
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def list_open(self) -> list[str]:
        """Return between whom connections are open at this moment, in words."""
        return [f"a connection {c.dialler} to {c.target}" for c in list(self._connections)]

    def add(self, target: str) -> int:
        """Listen for a new peer; return the port, which the peer has to take at PEER_HOST."""
        return self._run(self._listen(target))

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two ends, in either direction."""
        self._call(self._find_door(one, other).clear)

    def heal(self, one: str, other: str) -> None:
        """Let everything pass again, also what was held back."""
        self._call(self._find_door(one, other).set)

    def reset(self, one: str, other: str) -> None:
        """Break every connection that is open between two ends."""
        self._call(lambda: self._break({one, other}))

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function on the loop, and return when it is done."""

        async def call() -> None:
            function()

        self._run(call())

    def _break(self, ends: set[str]) -> None:
        for connection in self._connections:
            if {connection.dialler, connection.target} == ends:
                connection.task.cancel()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _find_door(self, one: str, other: str) -> asyncio.Event:
        """Return what is set while bytes pass between two ends."""
        ends = frozenset((one, other))
        if ends not in self._doors:
            self._doors[ends] = asyncio.Event()
            self._doors[ends].set()
        return self._doors[ends]

    async def _listen(self, target: str) -> int:
        while True:
            listening = socket.create_server((PROXY_HOST, 0), backlog=128)
            port = listening.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server((PEER_HOST, port)):
                break
            listening.close()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(target, port, reader, writer))
            self._transports.add(writer.transport)
            # Not in the task: one that is cancelled before its first step runs nothing.
            task.add_done_callback(lambda _: writer.close())

        self._servers.append(await asyncio.start_server(serve, sock=listening))
        return port

    async def _serve(
        self, target: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        dialler = find_owner(writer.get_extra_info("peername")[1], port, self._find_processes())
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(dialler, target, task)
        self._connections.add(connection)
        try:
            await self._carry(self._find_door(dialler, target), port, reader, writer)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.discard(connection)

    async def _carry(
        self,
        door: asyncio.Event,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry bytes both ways until either end has hung up."""
        await door.wait()
        inner_reader, inner_writer = await asyncio.open_connection(PEER_HOST, port)
        self._transports.add(inner_writer.transport)
        pumps = [
            asyncio.create_task(_pump(door, reader, inner_writer)),
            asyncio.create_task(_pump(door, inner_reader, writer)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        except BaseException:
            inner_writer.transport.abort()
            raise
        finally:
            inner_writer.close()  # before anything that can be cancelled
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _close(self) -> None:
        # What was just accepted comes to its task first: a server that is closed would lose it.
        for server in self._servers:
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        for transport in list(self._transports):
            transport.abort()  # also of those whose last bytes nobody takes
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # sockets are closed in the next round


async def _pump(
    door: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        await door.wait()
        writer.write(piece)
        await writer.drain()
    await door.wait()  # that somebody hung up does not get through either


def find_owner(port: int, listening_port: int, names: Mapping[int, str]) -> str:
    """Return the name of the process with the near end of a connection, "" when it has none."""
    inode = _find_inode(port, listening_port)
    for pid, name in names.items():
        if f"socket:[{inode}]" in _list_descriptors(pid):
            return name
    return ""


def is_connected(pid: int, host: str) -> bool:
    """Return whether a process has a connection to an address, or one that it has not closed."""
    far = socket.inet_aton(host)[::-1].hex().upper()
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    inodes = {line.split()[9] for line in lines if line.split()[2].startswith(far)}
    return not _list_descriptors(pid).isdisjoint(f"socket:[{inode}]" for inode in inodes)


def _find_inode(port: int, listening_port: int) -> str:
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        near, far = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        if (near, far) == (port, listening_port):
            return fields[9]
    return ""


def _list_descriptors(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry))
    return found
