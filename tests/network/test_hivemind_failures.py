"""The DHT while processes are killed or stand still."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from announcements import MODEL, identity_of
from directory_processes import Directories, look_up, sign_now, start
from processes import children_of, kill_if_running, stop, wait_until_dead

from shoal.protocol.errors import DirectoryError
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

pytestmark = pytest.mark.network
PATIENCE_SECONDS = 120.0  # only a broken test waits this long


def pause(peers: contextlib.ExitStack, pid: int) -> None:
    """Stop a p2pd, and kill it when the test is over: stopped, it would outlive everybody."""
    peers.callback(kill_if_running, pid)
    stop(pid)


async def wait_until_answered(directory: HivemindDirectory, num_peers: int = 1) -> None:
    """Look up until somebody answers, with all the peers that there are.

    libp2p does not dial again for 5 s and longer after each failure, nor tells us when it does.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(DirectoryError):
                if len(await directory.lookup(MODEL)) == num_peers:
                    return
            await asyncio.sleep(0.2)


async def look_up_until(directory: HivemindDirectory, has_happened: Callable[[], bool]) -> None:
    """Look up, though nobody answers, until something has happened."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not has_happened():
            with pytest.raises(DirectoryError, match="no peer of the directory answers"):
                await directory.lookup(MODEL)
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def keep_port() -> Iterator[int]:
    """Return a port that only a listener that asks for it by number can get meanwhile.

    Sockets that are bound and do not listen are not in the way of one that does, where both say
    SO_REUSEADDR, as Go's do; but the kernel gives their port to nobody else.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


async def test_directory_whose_nodes_all_stand_still_is_not_taken_for_read_or_written(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    """Our own p2pd runs; those of all others are stopped."""
    others = [start(peers, 1)]
    others.append(start(peers, 2, others[0].address))
    ours = await dht.join([other.address for other in others], 3)
    assert await look_up(ours) == {other.peer_id for other in others}

    for other in others:
        pause(peers, other.p2pd)

    with pytest.raises(DirectoryError, match="no peer of the directory answers"):
        await ours.lookup(MODEL)
    with pytest.raises(DirectoryError, match="no node of the directory keeps"):
        await ours.announce(sign_now(3))


async def test_lookup_survives_the_kill_of_a_peer_and_its_p2pd_leaves_with_it(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    first = start(peers, 1)
    others = [start(peers, number, first.address) for number in (2, 3)]
    everyone = {peer.peer_id for peer in (first, *others)}

    assert all(peer.address for peer in others)
    reader = await dht.read([first.address, others[0].address])
    assert await look_up(reader) == everyone
    p2pd = first.p2pd

    first.kill()
    found = await look_up(reader)
    newcomer = await dht.read([first.address, others[0].address])
    found_by_newcomer = await look_up(newcomer)

    assert found == everyone  # its word stands until it expires
    assert found_by_newcomer >= {peer.peer_id for peer in others}
    wait_until_dead([p2pd])
    await dht.close()
    assert children_of(os.getpid()) == [peer._process.pid for peer in others]


async def test_lookup_answers_though_a_peer_fell_silent(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    first = start(peers, 1)
    second = start(peers, 2, first.address)

    reader = await dht.read([second.address])
    assert len(await look_up(reader)) == 2

    pause(peers, first.p2pd)

    assert len(await look_up(reader)) == 2
    assert len(await look_up(reader)) == 2


async def test_cancelled_lookup_leaves_no_task_behind(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    """Else asyncio says on a user's screen that a task of hivemind was destroyed."""
    first = start(peers, 1)
    reader = await dht.read([start(peers, 2, first.address).address])
    assert len(await look_up(reader)) == 2
    pause(peers, first.p2pd)
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context["message"])))

    before = asyncio.all_tasks()
    looking_up = asyncio.create_task(reader.lookup(MODEL))
    while "worker" not in repr(asyncio.all_tasks() - before):  # noqa: ASYNC110 - hivemind's
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    looking_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking_up
    await reader.close()
    gc.collect()

    assert complaints == []


async def test_reader_says_when_everyone_is_gone_and_finds_back(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    port = peers.enter_context(keep_port())
    first = start(peers, 1, port=port)

    reader = await dht.read([first.address])
    assert len(await reader.lookup(MODEL)) == 1

    p2pd = first.p2pd
    first.kill()
    wait_until_dead([p2pd])  # it holds the port, and the next one needs it
    with pytest.raises(DirectoryError, match=r"no peer of the directory answers: /ip4/127"):
        await reader.lookup(MODEL)

    again = start(peers, 1, port=port)
    assert again.address == first.address
    await wait_until_answered(reader)

    pause(peers, again.p2pd)
    with pytest.raises(DirectoryError, match="no peer of the directory answers"):
        await reader.lookup(MODEL)
    os.kill(again.p2pd, signal.SIGCONT)
    await wait_until_answered(reader)


async def test_reader_finds_back_through_a_peer_that_it_did_not_join_through(
    peers: contextlib.ExitStack, dht: Directories
) -> None:
    """It has read where that one carries streams to others, and remembers."""
    port = peers.enter_context(keep_port())
    first = start(peers, 1)
    second = start(peers, 2, first.address, port=port)

    assert second.address
    reader = await dht.read([first.address])
    assert len(await reader.lookup(MODEL)) == 2

    p2pd = second.p2pd
    for peer in (first, second):
        peer.kill()
    wait_until_dead([p2pd])
    await look_up_until(reader, lambda: not len(reader._neighbourhood))

    # It begins a swarm of its own, and tells nobody of another one: but its node is found.
    start(peers, 2, port=port)
    await look_up_until(reader, lambda: second.peer_id in reader._neighbourhood.peer_ids)


async def test_initial_peer_that_dies_while_one_joins_leaves_no_socket_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dht: Directories
) -> None:
    from shoal.protocol.net.libp2p.p2p_daemon import P2P

    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", f"/unix{tmp_path}/")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    dying = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = dying.sockets[0].getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity_of(1).peer_id}"
    with pytest.raises(DirectoryError):
        await dht.join([address])
    dying.close()

    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]
