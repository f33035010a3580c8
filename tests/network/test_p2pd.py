"""What p2pd takes from strangers, and what is left of their questions. Starts real p2pds."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from libp2p_parts import connected_p2pds
from processes import is_running

from shoal.protocol.errors import DirectoryError, P2pdEndedError, ShoalError, UnavailableError
from shoal.protocol.identity import Identity, peer_id_bytes
from shoal.protocol.ids import PeerId, SessionId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.records import (
    DIGEST_BYTES,
    MAX_NAMED_RECORDS,
    MAX_RECORD_BYTES,
    MAX_RECORDS_BYTES,
    RecordFetch,
    Records,
)
from shoal.protocol.net.dht.dht_node import MAX_FIND_BYTES
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.libp2p.p2p_daemon import (
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    OwnGroupP2P,
    child_of,
    connect,
    list_relays,
    open_byte_stream,
    start_reading_p2pd,
    stop_p2pd,
    stopping_if_failed,
)

pytestmark = [
    pytest.mark.network,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("shipped_p2pd"),
]

PROTOCOL = "a question"
PATIENCE_SECONDS = 60.0  # only a broken test waits this long
MOST_STREAMS = 10_000
NUM_STOPPED = 10
NUM_AT_ONCE = 200
LESS_DATA_BYTES = 160 * 2**20
SESSION = SessionId(bytes(range(16)))
LONGEST_ANSWER = encode_frame(Records(SESSION, (bytes(100),) * (MAX_RECORDS_BYTES // 100)))
LONGEST_QUESTION = encode_frame(
    RecordFetch(
        SESSION,
        bytes(MAX_RECORD_BYTES),
        bytes(DIGEST_BYTES * MAX_NAMED_RECORDS),
        MAX_RECORDS_BYTES,
    )
)


def encode_length(number: int) -> bytes:
    """Return how protobuf says that so many bytes follow."""
    digits = b""
    while number >= 0x80:
        digits += bytes([number & 0x7F | 0x80])
        number >>= 7
    return digits + bytes([number])


def read_peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had; 0 where it has ended."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


async def handle_at_once(question: bytes, _: object) -> bytes:
    return question


@contextlib.contextmanager
def collect_complaints() -> Iterator[list[str]]:
    """Give what asyncio would tell the user."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context["message"])))
    yield complaints
    gc.collect()


@pytest.mark.slow
async def test_p2pd_ends_rather_than_take_all_memory_for_what_strangers_promise() -> None:
    """Each stream says that the longest message follows, which never comes.

    The limit is lowered, so that one stranger reaches it before the limit of its own p2pd.
    """
    async with connected_p2pds() as ((victim,), (stranger,)):
        await victim._client.add_unary_handler(PROTOCOL, handle_at_once)
        peer_id, process = PeerId(str(victim.peer_id)), child_of(victim)
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA)[0] == MAX_DATA_BYTES
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (LESS_DATA_BYTES, LESS_DATA_BYTES))
        num_opened = peak_bytes = 0
        with contextlib.ExitStack() as opened, contextlib.suppress(ShoalError):
            for number in range(MOST_STREAMS):
                _, writer = await open_byte_stream(stranger, peer_id, PROTOCOL)
                opened.callback(lambda writer=writer: writer.transport.abort())
                writer.write(encode_length(MAX_MESSAGE_BYTES))
                num_opened += 1
                if number % 100 == 0 and (found := read_peak_bytes(process.pid)):
                    peak_bytes = found

        async with asyncio.timeout(PATIENCE_SECONDS):
            await process.wait()

    assert num_opened < MOST_STREAMS
    assert 0 < peak_bytes < LESS_DATA_BYTES


@pytest.mark.parametrize(
    "num_bytes", [len(LONGEST_ANSWER) + 100, len(LONGEST_QUESTION) + 100, MAX_FIND_BYTES]
)
async def test_longest_messages_of_nodes_come_through(num_bytes: int) -> None:
    async with connected_p2pds() as ((asked,), (asker,)):
        await asked._client.add_unary_handler(PROTOCOL, handle_at_once)

        message = bytes(num_bytes)
        assert await asker._client.call_unary_handler(asked.peer_id, PROTOCOL, message) == message


async def test_longer_message_is_neither_sent_nor_received() -> None:
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

    async with connected_p2pds() as ((asked,), (asker,)):
        await asked._client.add_unary_handler(PROTOCOL, handle_at_once)
        client = asker._client
        with pytest.raises(P2PDaemonError, match="size exceeds"):
            await client.call_unary_handler(asked.peer_id, PROTOCOL, bytes(MAX_MESSAGE_BYTES))
        _, writer = stream = await open_byte_stream(asker, PeerId(str(asked.peer_id)), PROTOCOL)
        writer.write(encode_length(MAX_MESSAGE_BYTES + 1))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await stream[0].read() == b""
        writer.transport.abort()


async def test_questions_that_nobody_waits_for_any_more_are_forgotten() -> None:
    num_begun = num_ended = 0

    async def handle(question: bytes, _: object) -> bytes:
        nonlocal num_begun, num_ended
        num_begun += 1
        try:
            await asyncio.Future()
        finally:
            num_ended += 1
        return b""

    async with connected_p2pds() as ((asked,), (asker,)), asyncio.timeout(PATIENCE_SECONDS):
        await asked._client.add_unary_handler(PROTOCOL, handle)
        for number in range(1, 6):
            asking = asyncio.create_task(
                asker._client.call_unary_handler(asked.peer_id, PROTOCOL, b"")
            )
            while num_begun < number:  # noqa: ASYNC110 - hivemind's task
                await asyncio.sleep(0)
            asking.cancel()
            while num_ended < number:  # noqa: ASYNC110 - hivemind's task
                await asyncio.sleep(0)
        gc.collect()

        # hivemind's loop has the last one at hand.
        assert len(asked._client.control._handler_tasks) <= 1


async def test_end_of_p2pd_leaves_no_task_that_waits_for_ever() -> None:
    """A client that was thrown away would have it destroyed, and the user told."""
    async with connected_p2pds() as (_, (asker,)), asyncio.timeout(PATIENCE_SECONDS):
        control = asker._client.control
        os.kill(child_of(asker).pid, signal.SIGKILL)

        await asyncio.wait([control._read_task])

        assert control._write_task.done()


async def test_address_where_nobody_answers_is_named_without_the_words_of_libp2p() -> None:
    async with connected_p2pds() as (_, (asker,)):
        address, peer_id = "/ip4/127.0.0.1/tcp/9", Identity(bytes([9]) * 32).peer_id

        with pytest.raises(UnavailableError) as refusal:
            await connect(asker, peer_id, address)

    assert str(refusal.value) == f"nobody answers at {address}: connection refused"


async def test_questions_that_came_at_once_are_answered_in_many_turns_of_the_loop() -> None:
    """Or else a stranger's thousand small questions hold up everybody for half a second."""
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
    from hivemind.proto import p2pd_pb2

    num_turns, answered_in = 0, list[int]()

    async def handle(question: bytes, _: object) -> bytes:
        answered_in.append(num_turns)
        return question

    connector: Any = None
    control: Any = ControlClient(connector, _initialized_with_create=True)
    control.unary_handlers[PROTOCOL] = handle
    reader, peer = asyncio.StreamReader(), Identity(bytes([9]) * 32).peer_id
    asked = p2pd_pb2.CallUnaryRequest(peer=peer_id_bytes(peer), proto=PROTOCOL, data=b"?")
    for number in range(NUM_AT_ONCE):
        said = p2pd_pb2.PersistentConnectionResponse(
            callId=number.to_bytes(16), requestHandling=asked
        ).SerializeToString()
        reader.feed_data(encode_length(len(said)) + said)
    reading = asyncio.create_task(control._read_from_persistent_conn(reader))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(answered_in) < NUM_AT_ONCE:
            await asyncio.sleep(0)
            num_turns += 1
    reader.feed_eof()
    await reading

    assert len(set(answered_in)) == NUM_AT_ONCE


async def test_two_questions_under_one_id_are_answered_without_a_complaint() -> None:
    """The asker chooses the id, as a p2pd of its own would have it do by chance only."""
    from hivemind.proto import p2pd_pb2

    num_begun, both = 0, asyncio.Event()

    async def handle(question: bytes, _: object) -> bytes:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 2:
            both.set()
        await both.wait()
        return b""

    with collect_complaints() as complaints:
        async with connected_p2pds() as ((asked,), (asker,)), asyncio.timeout(PATIENCE_SECONDS):
            await asked._client.add_unary_handler(PROTOCOL, handle)
            peer_id = PeerId(str(asked.peer_id))
            question = p2pd_pb2.PersistentConnectionRequest(
                callId=bytes(16),
                callUnary=p2pd_pb2.CallUnaryRequest(peer=b"", proto=PROTOCOL, data=b""),
            ).SerializeToString()
            streams = [await open_byte_stream(asker, peer_id, PROTOCOL) for _ in range(2)]
            for _, writer in streams:
                writer.write(encode_length(len(question)) + question)
            await both.wait()
            done = [asyncio.create_task(reader.read(1)) for reader, _ in streams]
            await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            for _, writer in streams:
                writer.transport.abort()
            await asyncio.wait(done)

    assert complaints == []


@pytest.mark.parametrize("ends_first", ["p2pd", "we"])
async def test_nothing_that_waits_is_left_behind(ends_first: str) -> None:
    """Else asyncio says on a user's screen that a task of hivemind was destroyed."""
    begun = asyncio.Event()

    async def handle(question: bytes, _: object) -> bytes:
        begun.set()
        await asyncio.Future()
        return b""

    before = asyncio.all_tasks()
    with collect_complaints() as complaints:
        async with connected_p2pds() as ((asked,), (asker,)):
            await asked._client.add_unary_handler(PROTOCOL, handle)
            client: Any = asker._client
            asking = asyncio.create_task(client.call_unary_handler(asked.peer_id, PROTOCOL, b""))
            await begun.wait()
            if ends_first == "p2pd":
                for p2p in (asker, asked):  # ours first, or "stream reset" may come
                    child_of(p2p).kill()
            else:
                await stop_p2pd(asker)
            with pytest.raises(Exception, match="has ended"):
                await asking
            del asked, asker, client
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
    assert complaints == []
    assert {task for task in left if not task.done()} == set()


@pytest.mark.slow
async def test_p2pd_that_ends_while_it_is_stopped_leaves_its_exit_status_to_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On one core, p2pd is often dead for a moment before the thread that waits for it knows."""
    cores = os.sched_getaffinity(0)
    try:
        for _ in range(NUM_STOPPED):
            p2p = await start_reading_p2pd([], None)
            process = child_of(p2p)
            pin_threads({min(cores)}, os.getpid(), process.pid)
            process.send_signal(signal.SIGKILL)
            while is_running(process.pid):
                pass
            await stop_p2pd(p2p)
            assert process.returncode == -signal.SIGKILL
            pin_threads(cores, os.getpid())
    finally:
        pin_threads(cores, os.getpid())

    assert caplog.messages == []


def pin_threads(cores: set[int], *pids: int) -> None:
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(thread), cores)


async def test_start_without_a_disk_is_an_error_of_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))

    with pytest.raises(DirectoryError, match=r"cannot start p2pd: .*No such file"):
        await start_reading_p2pd([], None)


async def test_start_that_fails_at_its_last_step_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p2pd was killed right behind its start: tasks waited on, for a garbage collection."""

    async def identify(client: p2pclient.Client) -> None:
        await asyncio.sleep(0)
        raise P2PDaemonError("p2pd has ended")

    monkeypatch.setattr(p2pclient.Client, "identify", identify)
    with collect_complaints() as complaints:
        with pytest.raises(DirectoryError):
            await start_reading_p2pd([], None, begins_alone=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert complaints == []


async def test_cancellation_outlives_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd stops a service with one signal to us and to p2pd."""
    is_starting, is_killed = asyncio.Event(), asyncio.Event()

    async def create(**_: Any) -> Any:
        is_starting.set()
        await is_killed.wait()
        raise P2pdEndedError("p2pd has ended")

    monkeypatch.setattr(OwnGroupP2P, "create", create)
    starting = asyncio.create_task(start_reading_p2pd([], None, begins_alone=True))
    await is_starting.wait()
    starting.cancel()
    await asyncio.sleep(0)
    is_killed.set()

    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_p2pd_is_stopped_although_who_asks_whether_it_ended_is_cancelled() -> None:
    p2p = await start_reading_p2pd([], None)

    async def fail() -> None:
        async with stopping_if_failed(p2p):
            raise DirectoryError("p2pd did not do what it was asked for")

    failing = asyncio.create_task(fail())
    await asyncio.sleep(0)  # from here it waits for news of the process
    failing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await failing
    try:
        assert child_of(p2p).returncode is not None
    finally:
        await stop_p2pd(p2p)


def test_relay_may_be_reached_at_each_of_its_addresses_off_this_machine() -> None:
    peer_id = Identity(bytes(32)).peer_id
    hosts = ("127.0.0.1", "192.0.2.1", "10.0.0.1")
    peers = [PeerAddress.parse(f"/ip4/{host}/tcp/4001/p2p/{peer_id}") for host in hosts]

    assert [relay.host for relay in list_relays(peers)] == ["192.0.2.1", "10.0.0.1"]
