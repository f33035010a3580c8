"""A p2pd that ends is replaced, and the directory goes on where it was. Starts real p2pds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from announcements import MODEL, identity_of
from directory_processes import CLOCK, Directories, look_up, sign_now
from processes import children_of, kill_if_running, wait_until_dead

from shoal.protocol.errors import DirectoryError, P2pdEndedError, ShoalError
from shoal.protocol.net.dht.access import DirectoryNode
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.dht.neighbourhood import Neighbourhood
from shoal.protocol.net.libp2p.multiaddrs import split_multiaddr
from shoal.protocol.net.libp2p.p2p_daemon import child_of
from shoal.protocol.net.transport import Stream

pytestmark = pytest.mark.network
PATIENCE_SECONDS = 60.0  # only a broken test waits this long

CLIENT = """
import asyncio, contextlib, gc, os, signal, sys
from shoal.client.concurrency.portal import Portal
from shoal.protocol.errors import DirectoryError
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

MODEL, ADDRESS = sys.argv[1:]

async def look_up(directory):
    with contextlib.suppress(DirectoryError):
        return await directory.lookup(MODEL)

async def read(portal):
    directory = await HivemindDirectory.join(
        [ADDRESS], identity=None, clock=SystemClock(), client_mode=True
    )
    portal.run_at_close(directory.close)
    looking_up = asyncio.create_task(look_up(directory))
    await asyncio.sleep(0)
    p2pd = directory._node.p2pd
    os.kill(p2pd.pid, signal.SIGKILL)
    await looking_up
    while directory._node.p2pd is p2pd or not await look_up(directory):
        await asyncio.sleep(0.01)
    in_flight = asyncio.create_task(look_up(directory))
    await asyncio.sleep(0)

with Portal() as portal:
    portal.run(read(portal))
gc.collect()
"""


def kill_p2pd(directory: HivemindDirectory) -> None:
    os.kill(child_of(directory._access.p2p).pid, signal.SIGKILL)


async def wait_until_found(directory: HivemindDirectory, *numbers: int) -> None:
    """Look up until exactly the peers of some numbers are found."""
    expected = {identity_of(number).peer_id for number in numbers}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(DirectoryError):
                if await look_up(directory) == expected:
                    return
            await asyncio.sleep(0.1)


async def wait_until_ended(directory: HivemindDirectory) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await child_of(directory._access.p2p).wait()


def list_niceness(directory: HivemindDirectory) -> set[int]:
    """Return how nice the threads of its p2pd are."""
    niceness = set[int]()
    for thread in os.listdir(f"/proc/{child_of(directory._access.p2p).pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            niceness.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return niceness


async def test_peer_is_found_again_where_it_was_and_logs_loss_and_return(
    dht: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    first = await dht.join([], 1)
    second = await dht.join(first.addresses, 2)
    for number, directory in ((1, first), (2, second)):
        await directory.announce(sign_now(number))
    before = second.addresses
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert list_niceness(second) == {min(own + 15, 19)}

    with caplog.at_level(logging.INFO, "shoal"):
        kill_p2pd(second)
        await wait_until_ended(second)
        with pytest.raises(DirectoryError, match="another one is being started"):
            await second.announce(sign_now(2))
        known = second.records.list_current(MODEL, CLOCK.wall())
        assert {one.peer_id for one in known} >= {identity_of(2).peer_id}
        await wait_until_found(second, 1, 2)
        async with asyncio.timeout(PATIENCE_SECONDS):  # found as soon as the new p2pd answers
            while "the directory is back" not in caplog.text:  # noqa: ASYNC110 - a log
                await asyncio.sleep(0.01)

    assert second.addresses == before
    assert [record.message for record in caplog.records if record.name.startswith("shoal")] == [
        "the directory is lost: p2pd has ended and is started again",
        "the directory is back",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert list_niceness(second) == {min(own + 15, 19)}
    newcomer = await dht.read(before)
    assert list_niceness(newcomer) == {own}  # nobody else asks it
    await wait_until_found(newcomer, 1, 2)


async def test_p2pd_is_started_when_there_is_a_disk_again(
    dht: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    directory = await dht.join([], 1)

    # By its own name: `shoal serve` in this process, of other tests, has set a level for it.
    level = caplog.at_level(logging.DEBUG, HivemindDirectory.__module__)
    with monkeypatch.context() as without_disk, level:
        without_disk.setattr("tempfile.tempdir", str(tmp_path / "none"))
        kill_p2pd(directory)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "p2pd could not be started again" not in caplog.text:  # noqa: ASYNC110 - a log
                await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while child_of(directory._access.p2p).returncode is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await directory.announce(sign_now(1))


async def test_announcement_returns_with_p2pd_before_the_next_one_is_due(dht: Directories) -> None:
    """The only node that kept it is the one that lost everything."""
    only = await dht.join([], 1)
    await only.announce(sign_now(1))

    kill_p2pd(only)
    await wait_until_ended(only)
    await wait_until_found(only, 1)

    reader = await dht.read(only.addresses)
    await wait_until_found(reader, 1)


async def test_peer_comes_back_though_those_it_joined_through_are_gone(
    dht: Directories,
) -> None:
    first = await dht.join([], 1)
    second = await dht.join(first.addresses, 2)
    await second.announce(sign_now(2))
    await first.close()

    kill_p2pd(second)
    await wait_until_ended(second)
    await wait_until_found(second, 2)

    newcomer = await dht.read(second.addresses)
    await wait_until_found(newcomer, 2)


async def test_reader_joins_again_each_time(dht: Directories) -> None:
    server = await dht.join([], 1)
    await server.announce(sign_now(1))
    reader = await dht.read(server.addresses)

    for _ in range(2):
        kill_p2pd(reader)
        await wait_until_ended(reader)
        await wait_until_found(reader, 1)


async def test_reader_comes_back_though_those_it_joined_through_are_gone(
    dht: Directories,
) -> None:
    first = await dht.join([], 1)
    second = await dht.join(first.addresses, 2)
    _, port = split_multiaddr(second.addresses[0])
    await second.announce(sign_now(2, directory_port=port))
    reader = await dht.read(first.addresses)
    await wait_until_found(reader, 2)
    await first.close()

    kill_p2pd(reader)
    await wait_until_ended(reader)
    newer = await dht.join(second.addresses, 3)
    await newer.announce(sign_now(3))
    await wait_until_found(reader, 2, 3)


async def test_streams_of_libp2p_are_dialled_and_accepted_through_the_new_p2pd(
    dht: Directories,
) -> None:
    server = await dht.join([], 1)
    client = await dht.read(server.addresses)
    accepting, dialling = server.make_transport(), client.make_transport()

    async def echo(stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame)

    listener = await accepting.listen("127.0.0.1", 0, echo)
    for ended in (server, client):
        kill_p2pd(ended)
        await wait_until_ended(ended)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                stream = await dialling.open_stream(listener.endpoint)
                await stream.send(b"a token")
                assert await stream.receive() == b"a token"
                break
            except ShoalError:
                await asyncio.sleep(0.1)
    await stream.close()
    await dialling.close()
    await accepting.close()


async def test_closing_while_p2pd_is_started_again_leaves_no_process_or_socket(
    dht: Directories, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shoal.protocol.net.libp2p.p2p_daemon import P2P

    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", f"/unix{tmp_path}/")
    server = await dht.join([], 1)

    kill_p2pd(server)
    await wait_until_ended(server)
    while server._node.p2pd.returncode is not None:  # noqa: ASYNC110 - a process sets no event
        await asyncio.sleep(0.01)
    kill_p2pd(server)
    await wait_until_ended(server)
    await server.close()

    assert not any(name.endswith(".sock") for name in os.listdir(tmp_path))


async def kill_new_p2pds(number: int) -> None:
    """Kill so many children of this process as they appear."""
    spared = set(children_of(os.getpid()))
    while number:
        for pid in set(children_of(os.getpid())) - spared:
            kill_if_running(pid)
            spared.add(pid)
            number -= 1
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_reader", [True, False], ids=["reader", "peer"])
async def test_start_is_tried_again_where_p2pd_is_killed(dht: Directories, is_reader: bool) -> None:
    server = await dht.join([], 1)
    await server.announce(sign_now(1))

    killing = asyncio.create_task(kill_new_p2pds(2))
    directory = await dht.join(server.addresses, client_mode=is_reader)

    assert killing.done()
    assert await look_up(directory) == {identity_of(1).peer_id}


async def test_start_that_fails_three_times_is_the_fault_of_no_peer(
    dht: Directories, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shoal.protocol.net.libp2p.p2p_daemon import P2P

    server = await dht.join([], 1)
    before = children_of(os.getpid())
    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", f"/unix{tmp_path}/")

    killing = asyncio.create_task(kill_new_p2pds(3))
    with pytest.raises(P2pdEndedError, match="p2pd on this machine ended while it was starting"):
        await dht.read(server.addresses)

    async with asyncio.timeout(PATIENCE_SECONDS):
        await killing
    assert children_of(os.getpid()) == before
    assert not any(name.endswith(".sock") for name in os.listdir(tmp_path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "step",
    [
        "hivemind.p2p.p2p_daemon_bindings.p2pclient.Client.create",
        pytest.param(
            "hivemind.p2p.p2p_daemon_bindings.p2pclient.Client.identify",
            marks=pytest.mark.thorough,
        ),
        pytest.param("shoal.protocol.net.dht.access.find_swarm", marks=pytest.mark.thorough),
        "shoal.protocol.net.dht.access.start_node",
    ],
)
async def test_start_is_tried_again_wherever_p2pd_ends(
    step: str, dht: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a peer blamed that was asked through it. hivemind leaves a socket to be collected."""
    server = await dht.join([], 1)
    await server.announce(sign_now(1))
    spared, killed = set(children_of(os.getpid())), set[int]()
    real: Any = pkgutil.resolve_name(step.rpartition(".")[0])
    name = step.rpartition(".")[2]
    going_on = getattr(real, name)

    async def kill_and_go_on(*args: Any, **options: Any) -> Any:
        if not killed:
            killed.update(set(children_of(os.getpid())) - spared)
            for pid in killed:
                kill_if_running(pid)
            wait_until_dead([*killed])
        return await going_on(*args, **options)

    monkeypatch.setattr(real, name, kill_and_go_on)
    directory = await dht.read(server.addresses)
    gc.collect()

    assert len(killed) == 1
    assert await look_up(directory) == {identity_of(1).peer_id}


async def test_p2pd_that_ends_before_all_is_restored_is_closed_before_the_next_one(
    dht: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else asyncio says on a user's screen that a task of hivemind was destroyed."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context["message"])))
    server = await dht.join([], 1)
    await server.announce(sign_now(1))
    reader = await dht.read(server.addresses)
    restore, ended = Neighbourhood.restore, list[DirectoryNode]()

    async def restore_after_an_end(*arguments: Any) -> None:
        if reader._node not in ended and len(ended) < 2:
            ended.append(reader._node)
            kill_p2pd(reader)
            await wait_until_ended(reader)
        await restore(*arguments)

    monkeypatch.setattr(Neighbourhood, "restore", restore_after_an_end)
    with contextlib.suppress(DirectoryError):
        await reader.lookup(MODEL)
    await wait_until_found(reader, 1)
    assert len(ended) == 2
    ended.clear()
    gc.collect()

    assert complaints == []


async def test_program_whose_p2pd_is_killed_prints_nothing(dht: Directories) -> None:
    server = await dht.join([], 1)
    await server.announce(sign_now(1))

    client = await asyncio.to_thread(
        warm_python.run,
        [sys.executable, "-P", "-c", CLIENT, MODEL, *server.addresses],
        capture_output=True,
        text=True,
    )

    assert client.stderr == ""
    assert client.returncode == 0
