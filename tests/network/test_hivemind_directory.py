"""The DHT with real processes, real kills and a dishonest node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError, UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.hivemind_directory import HivemindDirectory
from shoal.protocol.spans import Span

pytestmark = pytest.mark.network

MODEL = ModelId("a" * 32)
CLOCK = SystemClock()
HERE = Path(__file__)
PATIENCE_SECONDS = 120.0  # only a broken test waits this long


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
    await directory.announce(sign(make_announcement(number), number))
    print(directory.addresses[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class Peer:
    """A process that runs `serve`."""

    def __init__(self, number: int, *initial_peers: str, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE), str(number), str(port), *initial_peers],
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


@pytest.fixture
def peers() -> Iterator[contextlib.ExitStack]:
    """Ends every peer that a test starts with `start`."""
    with contextlib.ExitStack() as stack:
        yield stack


def start(peers: contextlib.ExitStack, number: int, *initial_peers: str, port: int = 0) -> Peer:
    peer = Peer(number, *initial_peers, port=port)
    peers.callback(peer.close)
    return peer


def children_of(parent: int) -> list[int]:
    """Return the living children of a process, from Linux's /proc/PID/stat."""
    children: list[int] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent_text = file.read_text().rpartition(")")[2].split()[:2]
            if int(parent_text) == parent and state != "Z":
                children.append(int(file.parent.name))
    return children


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid), f"process {pid} outlived its parent")


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    """Poll for what another process does; the bound only keeps a broken test from hanging."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def pause(peers: contextlib.ExitStack, pid: int) -> None:
    """Stop a p2pd, and kill it when the test is over: stopped, it would outlive everybody."""
    peers.callback(kill_if_running, pid)
    os.kill(pid, signal.SIGSTOP)
    # Its threads stop one after the other, and any of them could still answer.
    wait_until(lambda: is_paused(pid), f"process {pid} does not stop")


def is_paused(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(file.read_text().rpartition(")")[2].split()[0] == "T" for file in threads)


def kill_if_running(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def look_up(directory: HivemindDirectory) -> tuple[set[str], float]:
    """Return who is found, and how many seconds it took."""
    started = time.monotonic()
    found = await directory.lookup(MODEL)
    return {announcement.peer_id for announcement in found}, time.monotonic() - started


async def wait_until_answered(directory: HivemindDirectory) -> None:
    """Look up until somebody answers, with the one peer that there is.

    libp2p does not dial again for 5 s and longer after each failure, nor tells us when it does.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(DirectoryError):
                if len(await directory.lookup(MODEL)) == 1:
                    return
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


def test_lookup_survives_the_kill_of_a_peer_and_its_p2pd_leaves_with_it(
    peers: contextlib.ExitStack,
) -> None:
    first = start(peers, 1)
    others = [start(peers, number, first.address) for number in (2, 3)]
    everyone = {peer.peer_id for peer in (first, *others)}

    async def main() -> None:
        assert all(peer.address for peer in others)
        reader = await HivemindDirectory.join(
            [first.address, others[0].address], identity=None, clock=CLOCK, client_mode=True
        )
        assert (await look_up(reader))[0] == everyone
        p2pd = first.p2pd

        first.kill()
        found, seconds = await look_up(reader)
        newcomer = await HivemindDirectory.join(
            [first.address, others[0].address], identity=None, clock=CLOCK, client_mode=True
        )
        found_by_newcomer, newcomer_seconds = await look_up(newcomer)

        assert found == everyone  # its word stands until it expires
        assert found_by_newcomer == everyone
        assert seconds < 2
        assert newcomer_seconds < 2
        wait_until_gone(p2pd)
        await reader.close()
        await newcomer.close()

    asyncio.run(main())
    assert children_of(os.getpid()) == [peer._process.pid for peer in others]


def test_lookup_does_not_wait_long_for_a_peer_that_fell_silent(
    peers: contextlib.ExitStack,
) -> None:
    first = start(peers, 1)
    second = start(peers, 2, first.address)

    async def main() -> None:
        reader = await HivemindDirectory.join(
            [second.address], identity=None, clock=CLOCK, client_mode=True
        )
        assert len((await look_up(reader))[0]) == 2

        pause(peers, first.p2pd)
        _, seconds = await look_up(reader)
        found, seconds_again = await look_up(reader)

        assert len(found) == 2
        assert seconds < 3
        assert seconds_again < 1
        await reader.close()

    asyncio.run(main())


def test_reader_says_when_everyone_is_gone_and_finds_back(peers: contextlib.ExitStack) -> None:
    port = peers.enter_context(keep_port())
    first = start(peers, 1, port=port)

    async def main() -> None:
        reader = await HivemindDirectory.join(
            [first.address], identity=None, clock=CLOCK, client_mode=True
        )
        assert len(await reader.lookup(MODEL)) == 1

        p2pd = first.p2pd
        first.kill()
        wait_until_gone(p2pd)  # it holds the port, and the next one needs it
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
        await reader.close()

    asyncio.run(main())


def test_node_has_the_peer_id_of_its_identity_and_leaves_no_key_behind(tmp_path: Path) -> None:
    async def main() -> None:
        directory = await HivemindDirectory.join([], identity=identity_of(7), clock=CLOCK)
        (address,) = directory.addresses
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{identity_of(7).peer_id}")
        (p2pd,) = children_of(os.getpid())
        await directory.close()
        assert not is_running(p2pd)

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(tmp_path))
        environment.setattr("tempfile.tempdir", None)
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_reader_neither_listens_nor_announces() -> None:
    async def main() -> None:
        server = await HivemindDirectory.join([], identity=None, clock=CLOCK)
        reader = await HivemindDirectory.join(
            server.addresses, identity=None, clock=CLOCK, client_mode=True
        )

        assert reader.addresses == ()
        with pytest.raises(UsageError, match="only reads"):
            await reader.announce(sign(make_announcement(1), 1))
        await reader.close()
        await server.close()

    asyncio.run(main())


def test_cancelled_join_leaves_no_process() -> None:
    async def main() -> None:
        for delay_seconds in (0, 0.02, 0.05):  # while it is forked, starts and says hello
            joining = asyncio.create_task(HivemindDirectory.join([], identity=None, clock=CLOCK))
            while not children_of(os.getpid()):  # noqa: ASYNC110 - a process sets no event
                await asyncio.sleep(0)
            await asyncio.sleep(delay_seconds)

            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining

            assert children_of(os.getpid()) == []

    asyncio.run(main())


def test_join_names_the_addresses_that_do_not_answer() -> None:
    peer_id = identity_of(1).peer_id

    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            busy = silent.getsockname()[1]
            refused, mute = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}" for port in (1, busy))
            started = time.monotonic()

            with pytest.raises(DirectoryError, match=refused):
                await HivemindDirectory.join([refused], identity=None, clock=CLOCK)
            with pytest.raises(DirectoryError, match=mute):
                await HivemindDirectory.join([refused, mute], identity=None, clock=CLOCK)
            assert time.monotonic() - started < 10

            with pytest.raises(UsageError, match="in use"):
                await HivemindDirectory.join([], identity=None, clock=CLOCK, port=busy)

    asyncio.run(main())
    assert children_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("initial_peers", "options"),
    [
        (["127.0.0.1:4001"], {}),
        (["/ip4/127.0.0.1/tcp/4001"], {}),
        (["/ip4/127.0.0.1/tcp/4001/p2p/nobody"], {}),
        ([], {"listen_host": "example.org"}),
        ([], {"swarm": ""}),
    ],
)
def test_impossible_join_is_a_usage_error(
    initial_peers: list[str], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        asyncio.run(HivemindDirectory.join(initial_peers, identity=None, clock=CLOCK, **options))


def test_join_says_how_far_the_clock_is_off(peers: contextlib.ExitStack) -> None:
    first = start(peers, 1)
    # hivemind reads its process's clock, so only a process whose clock is off can show this.
    code = (
        "import asyncio, time, hivemind.dht.protocol as protocol\n"
        "from shoal.protocol.net.clock import SystemClock\n"
        "from shoal.protocol.net.hivemind_directory import DirectoryError, HivemindDirectory\n"
        "for offset in (60, -60):\n"
        "    protocol.get_dht_time = lambda: time.time() + offset\n"
        "    try:\n"
        "        asyncio.run(HivemindDirectory.join(\n"
        f"            [{first.address!r}], identity=None, clock=SystemClock()))\n"
        "    except DirectoryError as error:\n"
        "        print(error)\n"
    )

    ahead, behind = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code], capture_output=True, text=True
    ).stdout.splitlines()

    for message in (ahead, behind):
        seconds = float(message.removeprefix("the clock of this machine is ").split()[0])
        assert abs(seconds - 60) <= 3
    assert "seconds ahead of" in ahead
    assert "seconds behind" in behind


def test_swarms_with_other_names_share_a_dht_without_mixing() -> None:
    async def main() -> None:
        main_swarm = await HivemindDirectory.join([], identity=None, clock=CLOCK)
        other = await HivemindDirectory.join(
            main_swarm.addresses, identity=None, clock=CLOCK, swarm="other"
        )
        await other.announce(sign(make_announcement(1), 1))
        reader = await HivemindDirectory.join(
            main_swarm.addresses, identity=None, clock=CLOCK, swarm="other", client_mode=True
        )

        assert await main_swarm.lookup(MODEL) == []
        assert [a.peer_id for a in await reader.lookup(MODEL)] == [identity_of(1).peer_id]
        for directory in (reader, other, main_swarm):
            await directory.close()

    asyncio.run(main())


def test_dishonest_node_neither_fills_nor_hides_nor_poisons(peers: contextlib.ExitStack) -> None:
    """A node without our checks stores junk and answers with it; honest ones are not impressed."""
    from hivemind.dht.node import DHTNode

    async def main() -> None:
        honest = await HivemindDirectory.join([], identity=None, clock=CLOCK)
        (p2pd,) = children_of(os.getpid())
        liar = await DHTNode.create(initial_peers=list(honest.addresses), nat_port_map=False)
        victim, bystander = make_announcement(1), make_announcement(2)
        everyone = {victim.peer_id, bystander.peer_id}
        await honest.announce(sign(victim, 1))
        await honest.announce(sign(bystander, 2))
        # This reaches into the directory: what is stored is exactly what is in question.
        gate, storage = honest._gate, honest._node.protocol.storage
        key, forever = gate.key_of(MODEL), float("inf")
        genuine = gate.wrap(sign(victim, 1))
        lies: list[tuple[Any, Any, float]] = [
            (victim.peer_id, gate.wrap(sign(make_announcement(3), 3)), forever),
            (victim.peer_id, genuine, forever),
            (identity_of(3).peer_id, genuine, victim.expires_at),
            (victim.peer_id, b"junk", forever),
            (victim.peer_id, ["junk"], forever),
            ("junk", b"junk", forever),
            (17, b"junk", 1e15),
            (None, b"junk in place of the dictionary", forever),
        ]

        for subkey, value, expires_at in lies:
            await liar.store(key, value, expires_at, subkey=subkey)
        await liar.store("another key", genuine, victim.expires_at, subkey=victim.peer_id)

        assert len(storage) == 1
        assert await honest.lookup(MODEL) == [victim, bystander]
        # The liar claims to have a later answer than anyone could have; nobody stops at it.
        liars_addresses = [str(address) for address in await liar.get_visible_maddrs()]
        peers.callback(kill_if_running, p2pd)
        assert await read_once(liars_addresses, slow=p2pd) == everyone
        # Alone, it can hide the one whose record it replaced, but the rest of its answer counts.
        await honest.close()
        assert await read_once(liars_addresses) == {bystander.peer_id}
        await liar.shutdown()

    asyncio.run(main())


async def read_once(addresses: list[str], slow: int | None = None) -> set[str]:
    """Return whom a newcomer finds; the p2pd `slow` stands still for the start of it."""
    reader = await HivemindDirectory.join(addresses, identity=None, clock=CLOCK, client_mode=True)
    try:
        if slow is not None:
            os.kill(slow, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.3, os.kill, slow, signal.SIGCONT)
        return (await look_up(reader))[0]
    finally:
        await reader.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
