# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false
"""p2pd, through which hivemind reaches the network: the start and end of the process, and requests.

hivemind takes seconds to import: import this where it is needed. Its own functions to connect to a
peer and to open a stream leave a socket open when they fail or are cancelled, and spell a peer id
inside an address in a way that p2pd does not read; so `connect` and `open_byte_stream` are our own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID
from weakref import WeakValueDictionary

from ...endpoints import Relay, is_loopback
from ...errors import (
    DirectoryError,
    NobodyAnswersError,
    P2pdEndedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from ...fair_share import Tenant, name_address
from ...identity import Identity, make_in_use_error, peer_id_bytes
from ...ids import PeerId
from ..addresses import check_can_listen
from ..tasks import cancel_all
from .hivemind_packages import importing_hivemind
from .multiaddrs import (
    PeerAddress,
    find_listening,
    make_listen_multiaddr,
    pack_multiaddr,
    split_multiaddr,
)

with importing_hivemind():
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import (
        ControlFailure,
        P2PDaemonError,
        raise_if_failed,
        read_pbmsg_safe,
        write_pbmsg,
    )
    from hivemind.proto import p2pd_pb2

_logger = logging.getLogger(__name__)

_START_SECONDS = 20.0  # p2pd gives its initial peers 5 s; the rest is for a busy machine
_STOP_SECONDS = 2.0
_NOT_CONNECTED = "bootstrap peers"
"""p2pd's words where an initial peer does not respond, or is another one."""
_SOCKETS = Path("/tmp")  # hivemind's choice
_MADE_SECONDS = 60.0
_NEWS_SECONDS = 0.2  # after which asyncio knows that p2pd has ended

MAX_MESSAGE_BYTES = 64 * 2**10
"""Of one question or answer of nodes: room for the longest, the 48 KiB of records that one answer
holds. p2pd sets aside what a stranger says that he is going to send."""

MAX_DATA_BYTES = 512 * 2**20
"""Memory in which p2pd ends rather than take more: it bounds neither streams nor connections. It
has 73 MiB at its start, and takes 8 KiB for each stream."""

# Python puts itself into a process group of its own and becomes p2pd, under the same process id.
# No session of its own: a stopped p2pd would then survive us, as the kernel would not wake it.
_LAUNCHER = f"""
import os, resource, sys
_, most = resource.getrlimit(resource.RLIMIT_DATA)
num_bytes = {MAX_DATA_BYTES} if most < 0 else min({MAX_DATA_BYTES}, most)
resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
os.environ["GOTRACEBACK"] = "none"  # it would say of each stream where it stood
os.setpgid(0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

_ENDED = (
    "p2pd on this machine ended while it was starting: the machine is out of memory, or another "
    "program ends it"
)

_NICENESS = 15
"""Of p2pd, beyond ours: strangers decide how much it does. With 10, one who asks all the time still
makes other clients wait more than twice as long, see decision 41."""

_AS_RELAY = {"relayBufferSize": 2**15, "relayMaxReservations": 64, "relayMaxCircuits": 16}
"""64 MiB at most, with two buffers for each of 16 connections to each of 64 peers."""

# For a relay: with one thread that runs Go, p2pd nearly always sets up its relay services in the
# order that we need, see circuit.py. With more it seldom does.
_IN_ONE_THREAD = f"import os; os.environ['GOMAXPROCS'] = '1'\n{_LAUNCHER}"


class OwnGroupP2P(P2P):
    """Keeps Ctrl-C in a terminal away from p2pd: it comes to us, and we end p2pd when it is time.

    hivemind offers no other way to change how it starts the process.
    """

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        is_relay = kwargs["relay"] and "forceReachabilityPublic" in kwargs
        kwargs |= _AS_RELAY if is_relay else {"relayService": False}
        launcher = _IN_ONE_THREAD if is_relay else _LAUNCHER
        start = [sys.executable, "-I", "-S", "-c", launcher]
        if kwargs.get("autoRelay"):
            # Else p2pd looks at the DHT for more relays, three minutes long, before it uses one.
            kwargs["relayDiscovery"] = False
        return start + P2P._make_process_args(*args, **kwargs)

    async def _ping_daemon(self) -> None:
        """End a start that fails at its last step: nobody else gets hold of what was started.

        Its tasks would wait until a garbage collection, of which asyncio tells the user.
        """
        try:
            await cast(Any, super())._ping_daemon()
        except BaseException:
            await stop_p2pd(self)
            raise

    def _terminate(self) -> None:
        """Do as hivemind does, and leave the exit status of p2pd to asyncio, which waits for it.

        Popen's way to send a signal takes it where p2pd has just ended, and asyncio then warns of
        an unknown child process.
        """
        hivemind = cast(Any, self)
        child, hivemind._child = hivemind._child, None
        super()._terminate()
        hivemind._child = child
        if child is not None:
            _send_signal(child, signal.SIGTERM)

    def _remove_socket(self) -> None:
        """Do what p2pd forgets that gives up in the middle of its start, and hivemind as well."""
        path = cast(Any, self)._daemon_listen_maddr["unix"]
        Path(path).unlink(missing_ok=True)

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """Report a failed start only after the end of the process: nobody waits for it later."""
        started: asyncio.Future[None] = asyncio.Future()

        def report(_: object) -> None:
            if started.exception() is None and not ready.done():
                ready.set_result(None)

        started.add_done_callback(report)
        await cast(Any, super())._read_outputs(started)
        error = started.exception()
        if error is not None:
            status = await child_of(self).wait()
            self._remove_socket()
            if not ready.done():
                is_ended = status < 0 or "failed to start: None" in str(error)
                ready.set_exception(P2pdEndedError(_ENDED) if is_ended else error)


async def start_reading_p2pd(
    initial_peers: Sequence[PeerAddress], identity: Identity | None, *, begins_alone: bool = False
) -> P2P:
    """Start a p2pd that only asks, through relays where initial peers are far.

    Raises DirectoryError when no initial peer can be reached, unless it begins alone.
    """
    options: dict[str, Any] = {
        "host_maddrs": None,
        "no_listen": True,
        "dht_mode": "client",
        "nat_port_map": False,
        "auto_nat": False,
        "use_relay": not all(peer.is_loopback for peer in initial_peers),
    }
    listening = () if begins_alone else await find_listening(initial_peers)
    return await _start(listening, identity, options)


async def start_serving_p2pd(
    initial_peers: Sequence[PeerAddress],
    identity: Identity | None,
    host: str,
    port: int,
    relays: Sequence[Relay] = (),
    *,
    is_relay: bool = False,
) -> P2P:
    """Start a p2pd that others ask; port 0 takes any free one. Outside traffic only off loopback.

    With relays it stays connected to them, and they carry to us what is meant for us. Without any
    it takes itself for reachable, off loopback, and can be a relay for others there.

    Raises UsageError when it cannot listen there or when an initial peer has the same identity,
    DirectoryError when no initial peer can be reached.
    """
    is_public = not is_loopback(host)
    options: dict[str, Any] = {
        "host_maddrs": [make_listen_multiaddr(host, port)],
        "nat_port_map": False,  # nobody asked the owner of the router
        "auto_nat": is_public,
        "use_relay": is_public and (is_relay or bool(relays)),
    }
    if relays:
        options |= {"use_auto_relay": True, "trusted_relays": [str(relay) for relay in relays]}
    if is_public:
        # p2pd would need minutes to find out by itself.
        options["force_reachability"] = "private" if relays else "public"
    # p2pd would share a port with another p2pd, and then get half of its connections.
    await check_can_listen(host, port)
    listening = await find_listening(initial_peers)
    _check_is_alone(listening, identity)
    return await _start(listening, identity, options)


async def stop_p2pd(p2p: P2P) -> None:
    """End p2pd, by force if it does not listen."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await p2p.shutdown()
    except TimeoutError:
        _send_signal(child_of(p2p), signal.SIGKILL)
    cast(Any, p2p)._remove_socket()  # one that was killed leaves it
    # Not only waits: it closes the pipe of what p2pd says, which hivemind leaves open.
    await child_of(p2p).communicate()


def lower_priority(p2p: P2P) -> None:
    """Have p2pd take what others leave of the processors, where they are busy.

    On Linux each thread has a priority of its own, and takes that of the thread that starts it.
    """
    pid, lowered = child_of(p2p).pid, set[int]()
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
    while new := _list_threads(pid) - lowered:
        for thread in new:
            with suppress(OSError):  # it has ended, or we may not
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        lowered |= new


def _list_threads(pid: int) -> set[int]:
    """Return what has a priority of its own in a process: itself, where no threads are listed."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except OSError:
        return {pid}


@asynccontextmanager
async def stopping_if_failed(p2p: P2P) -> AsyncGenerator[None]:
    """Stop p2pd where what is done with it fails or is interrupted; hivemind's errors become ours.

    Raises DirectoryError when p2pd does not do what it is asked for, P2pdEndedError when it has
    ended, whatever seemed to fail.
    """
    try:
        yield
    except BaseException as error:
        has_ended = False
        try:
            has_ended = isinstance(error, Exception) and await _has_ended(p2p)
        finally:
            await stop_p2pd(p2p)
        if has_ended:
            raise P2pdEndedError(_ENDED) from error
        if isinstance(error, (P2PDaemonError, ControlFailure, OSError, EOFError)):
            raise DirectoryError(f"p2pd failed at its start: {error!r}") from error
        raise


def list_relays(initial_peers: Sequence[PeerAddress]) -> list[Relay]:
    """Return the initial peers that may carry streams to us, at each of their addresses."""
    return [
        Relay(peer.host, peer.tcp_port, peer.peer_id)
        for peer in initial_peers
        if peer.tcp_port is not None and not peer.is_loopback
    ]


def child_of(p2p: P2P) -> asyncio.subprocess.Process:
    """Return the process of a p2pd."""
    return cast(Any, p2p)._child


async def _has_ended(p2p: P2P) -> bool:
    """Return whether p2pd has ended by itself; what it was asked for fails a moment earlier."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_NEWS_SECONDS):
            await child_of(p2p).wait()
    return child_of(p2p).returncode is not None


def id_of(p2p: P2P) -> PeerId:
    """Return the id under which others know a p2pd."""
    return PeerId(str(cast(Any, p2p).peer_id))


def _send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _check_is_alone(listening: Sequence[PeerAddress], identity: Identity | None) -> None:
    """Raise UsageError when another process has our identity: libp2p would only say "failed"."""
    for peer in listening:
        if identity is not None and peer.peer_id == identity.peer_id and peer.tcp_port is not None:
            raise make_in_use_error(f"at {peer.text}")


async def _start(
    initial_peers: Sequence[PeerAddress], identity: Identity | None, options: dict[str, Any]
) -> P2P:
    """Start p2pd. It ends by itself when our end of its socket closes, as in a kill -9 of us."""
    try:
        try:
            return await _start_process(initial_peers, identity, options)
        except P2PDaemonError as error:
            if _NOT_CONNECTED not in str(error):
                raise
        # p2pd gives an initial peer 5 s to answer; a busy one may need them for itself.
        return await _start_process(initial_peers, identity, options)
    except P2PDaemonError as error:
        raise _translate(error, initial_peers, options) from error
    except (ConnectionError, EOFError) as error:  # between its first word and its first answer
        raise P2pdEndedError(_ENDED) from error
    except OSError as error:  # no room for its files, no descriptors
        raise DirectoryError(f"cannot start p2pd: {error}") from error


def remove_dead_sockets(folder: Path = _SOCKETS) -> None:
    """Remove sockets of p2pds that were killed together with their owners: nobody listens there."""
    for path in folder.glob("hivemind-p2pd-*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)
            is_dead = asking.connect_ex(str(path)) == errno.ECONNREFUSED
            # Who has just made one listens in a moment.
            if is_dead and time.time() - path.stat().st_mtime > _MADE_SECONDS:
                path.unlink()


async def _start_process(
    initial_peers: Sequence[PeerAddress], identity: Identity | None, options: dict[str, Any]
) -> P2P:
    remove_dead_sockets()
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:  # mode 0700
        if identity is not None:
            file = Path(folder) / "identity"
            file.touch(mode=0o600)
            file.write_bytes(identity.to_libp2p_private_key())
            options = options | {"identity_path": str(file)}
        # A cancelled start would lose sight of its child: let it finish, then stop it.
        starting = asyncio.ensure_future(
            OwnGroupP2P.create(
                initial_peers=[peer.text for peer in initial_peers],
                startup_timeout=_START_SECONDS,
                persistent_conn_max_msg_size=MAX_MESSAGE_BYTES,
                check_if_identity_free=False,  # starts a second p2pd just to ask
                **options,
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(Exception):  # whatever a start that nobody waits for comes to
                await stop_p2pd(await starting)
            raise


_read_answers = cast(Any, ControlClient)._read_from_persistent_conn
_write_questions = cast(Any, ControlClient)._write_to_persistent_conn


class _PatientReader:
    """Reads what p2pd says, and lets others have the loop before each message.

    hivemind would read all questions that have come, hundreds of a stranger, and then answer all of
    them in one turn of the loop.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def readexactly(self, num_bytes: int) -> bytes:
        """Do as StreamReader does. Where a single byte is asked for, a message may begin."""
        if num_bytes == 1:
            await asyncio.sleep(0)
        return await self._reader.readexactly(num_bytes)


async def _read_on(control: Any, reader: asyncio.StreamReader) -> None:
    """Read what p2pd says, in place of hivemind's own reader, and own what comes of it.

    That one ends where an answer comes in the moment in which the asker gives up, and p2pd would
    not be heard any more. When p2pd has ended it leaves tasks that wait for ever, of which asyncio
    tells the user.
    """
    # hivemind never forgets a question whose asker gave up. And askers choose the ids: it removes
    # one that is there twice for each of them. Here both go by themselves, with their tasks.
    handling: Any = WeakValueDictionary[UUID, asyncio.Task[Any]]()
    handling.pop = handling.get
    control._handler_tasks = handling
    try:
        while True:
            with suppress(asyncio.InvalidStateError):
                return await _read_answers(control, _PatientReader(reader))
    except OSError as error:
        _logger.debug("p2pd is not heard any more: %r", error)
    finally:
        for asked in control._pending_calls.values():
            if not asked.done():
                asked.set_exception(P2PDaemonError("the p2pd process has ended"))
        # Nobody would end the writer, which waits for the next question.
        await cancel_all(filter(None, (*handling.values(), control._write_task)))


async def _write_on(control: Any, writer: asyncio.StreamWriter) -> None:
    """Tell p2pd what there is to say, as long as it hears."""
    with suppress(OSError):
        await _write_questions(control, writer)


cast(Any, ControlClient)._read_from_persistent_conn = _read_on
cast(Any, ControlClient)._write_to_persistent_conn = _write_on


def _translate(
    error: P2PDaemonError, initial_peers: Sequence[PeerAddress], options: dict[str, Any]
) -> UsageError | DirectoryError:
    """Say in our words why p2pd did not start."""
    texts = ", ".join(peer.text for peer in initial_peers)
    if "failed to listen" in str(error):
        return UsageError(f"cannot listen on {options['host_maddrs'][0]}: {error}")
    if _NOT_CONNECTED in str(error):
        return DirectoryError(
            "the program that accepts connections there is not the peer that the address names, "
            f"or does not respond: {texts}"
        )
    if "failed to start in" in str(error) and texts:
        return NobodyAnswersError(
            f"p2pd did not start in time: this machine is busy, or no peer responds at: {texts}"
        )
    return DirectoryError(f"cannot start p2pd to join the directory: {error}")


async def connect(p2p: P2P, peer_id: str, *addresses: str) -> None:
    """Have p2pd connect to a peer at any of some addresses, unless it is connected already.

    Raises UnavailableError when nobody answers there and RemoteProtocolError when it is somebody
    else, or the address is none.
    """
    try:
        peer, packed = peer_id_bytes(peer_id), [*map(pack_multiaddr, addresses)]
    except ValueError as error:
        where = " or ".join(addresses)
        raise RemoteProtocolError(f"{where} is no address of a peer: {error}") from error
    connecting = p2pd_pb2.ConnectRequest(peer=peer, addrs=packed)
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting)
    _, _, writer = await _ask(p2p, question, " or ".join(addresses))
    writer.transport.abort()


async def list_peers(p2p: P2P) -> list[tuple[str, str]]:
    """Return the peers that p2pd is connected to, and at which address; raises ShoalError."""
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
    answer, _, writer = await _ask(p2p, question, "p2pd")
    writer.transport.abort()
    found = [PeerInfo.from_protobuf(peer) for peer in answer.peers]
    return [(peer.peer_id.to_base58(), str(peer.addrs[0])) for peer in found]


async def open_byte_stream(
    p2p: P2P, peer_id: str, protocol: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a new stream to a peer that p2pd is connected to; raises UnavailableError.

    p2pd takes it for open before the other end has agreed.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol])
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    _, reader, writer = await _ask(p2p, question, f"peer …{peer_id[-6:]}")
    return reader, writer


async def _ask(
    p2p: P2P, question: Any, where: str
) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    """Put a question to p2pd; return its answer, and the socket that a stream goes on in."""
    try:
        reader, writer = await cast(Any, p2p)._client.control.daemon_connector.open_connection()
        try:
            answer: Any = p2pd_pb2.Response()
            await write_pbmsg(writer, question)
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:
            writer.transport.abort()
            raise
    except ControlFailure as error:
        raise _explain(error, where) from error
    except (OSError, EOFError) as error:
        raise UnavailableError("the p2pd process has ended") from error
    return answer, reader, writer


_REASONS = ("connection refused", "network is unreachable", "no route to host")
"""The reasons for which p2pd reaches nobody that people know."""


def _explain(error: ControlFailure, where: str) -> ShoalError:
    if "peer id mismatch" in str(error):
        return RemoteProtocolError(f"another peer answers at {where}")
    # What libp2p says is a list of its attempts, each with addresses and Go's words.
    _logger.debug("p2pd reaches nobody at %s: %s", where, error)
    found = next((reason for reason in _REASONS if reason in str(error)), "")
    return UnavailableError(f"nobody answers at {where}" + (f": {found}" if found else ""))


def name_dialler(info: Any) -> Tenant:
    """Return the name under which a stream is counted, by what p2pd says of it.

    All that comes through one relay has its address. There the peer ids, which libp2p has proven,
    keep strangers apart.
    """
    host, _ = split_multiaddr(str(info.addr))
    return Tenant(name_address(host), str(info.peer_id))
