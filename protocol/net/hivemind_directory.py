"""The directory over hivemind's Kademlia DHT, in process, on the running loop.

The only file that imports hivemind (seconds, and most of torch): import it where it is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import re
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ..announcement_book import AnnouncementBook
from ..announcements import Announcement
from ..errors import DirectoryError, LocalProtocolError, RemoteProtocolError, UsageError
from ..identity import Identity
from ..ids import ModelId
from .clock import Clock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

_logger = logging.getLogger(__name__)

# Together they keep a join that cannot succeed below ten seconds.
_PROBE_SECONDS = 2.0
_START_SECONDS = 6.0  # p2pd itself gives its initial peers 5 s
_JOIN_ANSWER_SECONDS = 3.0
# How long one neighbour may keep an operation waiting before it counts as gone, and how long
# a whole operation may take: with 16 questions at once, three rounds of nothing but dead ones.
_ANSWER_SECONDS = 1.5
_OPERATION_SECONDS = 5.0
_CLOSE_SECONDS = 2.0

_NODE_OPTIONS: dict[str, Any] = {
    # Reads must be fresh, and nobody shall fill our memory with what we did not ask for.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    "cache_size": 1,
    "reuse_get_requests": False,
    "num_workers": 16,  # dead neighbours are found out side by side, not one after the other
    "blacklist_time": 10.0,
    "wait_timeout": _JOIN_ANSWER_SECONDS,
}


class HivemindDirectory:
    """One node of the DHT and its p2pd process. Implements Directory; made by `join`.

    Under the key of (swarm, model) the DHT keeps a dictionary from peer id to signed record.
    What is found or stored here passes `_Gate`; lookups answer from what has passed.
    """

    def __init__(
        self, node: DHTNode, gate: _Gate, initial_peers: Sequence[str], addresses: Sequence[str]
    ) -> None:
        self._node = node
        self._gate = gate
        self._initial_peers = initial_peers
        self._addresses = tuple(addresses)
        self._is_closed = False

    @classmethod
    async def join(
        cls,
        initial_peers: Sequence[str],
        *,
        identity: Identity | None,
        clock: Clock,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        client_mode: bool = False,
        swarm: str = "main",
    ) -> HivemindDirectory:
        """Start a node and join through `initial_peers`; with none of them, begin a new DHT.

        With an identity, the node has its peer id. With `client_mode`, the node reads, and
        neither listens nor stores. `port` 0 takes any free one.

        Raises UsageError for a malformed address or swarm name and when it cannot listen there,
        DirectoryError when no initial peer answers within ten seconds or the clock is off.
        """
        _quieten_hivemind()
        _check_addresses(initial_peers)
        if not 0 < len(swarm) <= 64 or "\0" in swarm:
            raise UsageError("the name of a swarm has 1 to 64 characters")
        p2p = await _start_p2pd(
            await _find_listening(initial_peers),
            identity,
            None if client_mode else _make_listen_address(listen_host, port),
        )
        gate = _Gate(swarm, clock)
        try:
            addresses = [] if client_mode else await p2p.get_visible_maddrs()
            node = await _start_node(p2p, gate, initial_peers, client_mode)
        except BaseException:
            await _stop_p2pd(p2p)
            raise
        return cls(node, gate, initial_peers, [str(address) for address in addresses])

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs with our peer id, as in /ip4/127.0.0.1/tcp/4001/p2p/12D3KooW…; see the seam."""
        return self._addresses

    async def announce(self, record: bytes) -> None:
        """See Directory.announce. Raises UsageError in client mode."""
        self._check_is_running()
        if self._node.protocol.client_mode:
            raise UsageError("a directory in client mode only reads; join without client_mode")
        try:
            announcement = self._gate.read(record)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"our own announcement is not valid: {error}") from error
        try:
            self._gate.add(announcement.model_id, record)
        except RemoteProtocolError as error:
            raise DirectoryError(f"the directory did not take our announcement: {error}") from error
        key, value = self._gate.key_of(announcement.model_id), self._gate.wrap(record)
        await self._find_neighbours()
        is_stored = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                is_stored = await self._node.store(
                    key, value, announcement.expires_at, subkey=announcement.peer_id
                )
        # hivemind reports what the last replica said; others may have taken it.
        if not is_stored and await self._search(key, announcement.peer_id) != value:
            raise DirectoryError("no replica of the directory took our announcement")

    async def lookup(self, model_id: ModelId) -> list[Announcement]:
        """See Directory.lookup."""
        self._check_is_running()
        for _ in range(2):  # the first search may find out that every known neighbour is gone
            await self._find_neighbours()
            await self._search(self._gate.key_of(model_id))
            if self._has_neighbours():
                break
        else:
            if self._node.protocol.client_mode:
                raise DirectoryError(f"no peer of the directory answers: {self._initial_peers}")
        return self._gate.list_current(model_id)

    async def close(self) -> None:
        """See Directory.close."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._node.shutdown()
        except Exception as error:  # noqa: BLE001 - it says goodbye to a p2pd that may be gone
            _logger.debug("the DHT node did not shut down in good order: %r", error)
        finally:
            await _stop_p2pd(self._node.p2p)

    def _check_is_running(self) -> None:
        if self._is_closed:
            raise DirectoryError("the directory was closed")
        if _child_of(self._node.p2p).returncode is not None:
            raise DirectoryError("the p2pd process has ended; join the directory again")

    def _has_neighbours(self) -> bool:
        return bool(self._node.protocol.routing_table.uid_to_peer_id)

    async def _find_neighbours(self) -> None:
        """Go back to the initial peers after losing every neighbour: hivemind never does."""
        if self._has_neighbours():
            return
        self._node.blacklist.clear()
        peer_ids = {PeerID.from_base58(Multiaddr(item)["p2p"]) for item in self._initial_peers}
        await asyncio.gather(*(self._node.protocol.call_ping(peer_id) for peer_id in peer_ids))
        await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own

    async def _search(self, key: str, subkey: str | None = None) -> bytes | None:
        """Ask everyone near a key, which feeds the gate; return what stands under a subkey.

        Never "sufficient" is NaN: a replica could claim to have even an infinitely late value.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPERATION_SECONDS):
                found = await self._node.get_many([key], sufficient_expiration_time=float("nan"))
                if found[key] is not None and subkey in found[key].value:
                    return found[key].value[subkey].value
        return None


class _Gate(RecordValidatorBase):
    """Lets into our node only what a peer signed for the very place where it stands.

    That is (key of swarm and model, peer id as the subkey, expiry of the announcement). Replays of
    older records are refused. Swarms with different names may share one DHT.
    """

    def __init__(self, swarm: str, clock: Clock) -> None:
        self._swarm = swarm
        self._clock = clock
        self._book = AnnouncementBook()

    def read(self, record: bytes) -> Announcement:
        return self._book.read(record, self._clock.wall())

    def add(self, model_id: ModelId, record: bytes) -> None:
        self._book.add(self.key_of(model_id), record, self._clock.wall())

    def list_current(self, model_id: ModelId) -> list[Announcement]:
        return self._book.list_current(self.key_of(model_id), self._clock.wall())

    def key_of(self, model_id: ModelId) -> str:
        return _make_key(self._swarm, model_id)

    def wrap(self, record: bytes) -> bytes:
        """Return what stands in the DHT: the name of the swarm, which the key is made of too."""
        return self._swarm.encode() + b"\0" + record

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may keep a record or believe a replica. Never raises."""
        try:
            value = _read_packed_bytes(record.value)
            swarm_bytes, _, signed = value.partition(b"\0")
            announcement = self.read(signed)
            key = _make_key(swarm_bytes.decode(), announcement.model_id)
            if (
                record.key == DHTID.generate(source=key).to_bytes()
                and record.subkey == MSGPackSerializer.dumps(announcement.peer_id)
                and record.expiration_time == announcement.expires_at
            ):
                self._book.add(key, signed, self._clock.wall())
                return True
        except (RemoteProtocolError, UnicodeDecodeError) as error:
            _logger.debug("refused a record of the directory: %s", error)
        return False

    def keep_valid(self, key: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Remove what is not valid from a replica's answer and let the rest pass.

        hivemind would refuse the whole answer, so that one bad record hid all good ones. The
        maximal size also comes from the replica and ends in our own storage.
        """
        dictionary.maxsize = float("inf")
        for subkey, (value, expires_at) in list(dictionary.data.items()):
            is_sane = isinstance(subkey, str) and isinstance(value, bytes)
            if not is_sane or not self.validate(
                DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires_at)
            ):
                del dictionary[subkey]
        return True


def _make_key(swarm: str, model_id: ModelId) -> str:
    return hashlib.sha256(f"shoal directory 1\0{swarm}\0{model_id}".encode()).hexdigest()


def _read_packed_bytes(packed: bytes) -> bytes:
    """Undo MSGPack for byte strings only: its general decoder is not for strangers."""
    value = packed[2:] if packed.startswith(b"\xc4") else packed[3:]
    if MSGPackSerializer.dumps(value) != packed:
        raise RemoteProtocolError("the record is not a byte string")
    return value


def _check_addresses(initial_peers: Sequence[str]) -> None:
    for text in initial_peers:
        try:
            PeerID.from_base58(Multiaddr(text)["p2p"])
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"{text!r} is not the address of a peer: write /ip4/HOST/tcp/PORT/p2p/PEER_ID"
            ) from error


def _make_listen_address(host: str, port: int) -> str:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise UsageError(f"cannot listen on {host!r}: it is not an IP address") from error
    return f"/ip{version}/{host}/tcp/{port}"


async def _find_listening(initial_peers: Sequence[str]) -> list[str]:
    """Return the initial peers where someone accepts connections, or that cannot be tried.

    p2pd gives each 5 s and then only says that it failed; this takes less and says with whom.
    """

    async def is_listening(text: str) -> bool:
        address = Multiaddr(text)
        host = next((address[name] for name in ("ip4", "ip6", "dns4") if name in address), None)
        if host is None or "tcp" not in address or "p2p-circuit" in address:
            return True
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(host, int(address["tcp"]))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    are_listening = await asyncio.gather(*map(is_listening, initial_peers))
    listening = [text for text, is_up in zip(initial_peers, are_listening, strict=True) if is_up]
    if initial_peers and not listening:
        raise DirectoryError(f"no initial peer can be reached: {', '.join(initial_peers)}")
    return listening


async def _start_p2pd(
    initial_peers: Sequence[str], identity: Identity | None, listen_address: str | None
) -> P2P:
    """Start p2pd. It ends by itself when our end of its socket closes, as in a kill -9 of us."""
    is_local = (
        listen_address is None or ipaddress.ip_address(listen_address.split("/")[2]).is_loopback
    )
    options: dict[str, Any] = {
        "initial_peers": list(initial_peers),
        "startup_timeout": _START_SECONDS,
        "check_if_identity_free": False,  # starts a second p2pd just to ask
        # All of these talk to routers and strangers, which a loopback node must not.
        "nat_port_map": not is_local,
        "auto_nat": not is_local,
        "use_relay": not is_local,
    }
    if listen_address is None:
        options.update(no_listen=True, host_maddrs=None, dht_mode="client")
    else:
        options.update(host_maddrs=[listen_address])
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:  # mode 0700
        if identity is not None:
            file = Path(folder) / "identity"
            file.touch(mode=0o600)
            file.write_bytes(identity.to_libp2p_private_key())
            options.update(identity_path=str(file))
        # A cancelled start would lose sight of its child: let it finish, then stop it.
        starting = asyncio.ensure_future(P2P.create(**options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(P2PDaemonError):
                await _stop_p2pd(await starting)
            raise
        except P2PDaemonError as error:
            if "failed to listen" in str(error):
                raise UsageError(f"cannot listen on {listen_address}: {error}") from error
            raise DirectoryError(
                f"cannot join the directory through {', '.join(initial_peers)}: {error}"
            ) from error


async def _start_node(
    p2p: P2P, gate: _Gate, initial_peers: Sequence[str], client_mode: bool
) -> DHTNode:
    try:
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=list(initial_peers),
            client_mode=client_mode,
            record_validator=gate,
            **_NODE_OPTIONS,
        )
    except ValidationError as error:
        raise DirectoryError(_explain(error)) from error
    except RuntimeError as error:  # none of the initial peers responded
        raise DirectoryError(f"no initial peer answers: {', '.join(initial_peers)}") from error
    node.protocol.wait_timeout = _ANSWER_SECONDS
    # A replica's answer: without this hook, still safe, but all or nothing.
    cast(Any, node.protocol)._validate_dictionary = gate.keep_valid
    return node


def _explain(error: ValidationError) -> str:
    """Translate why the initial peers do not want us."""
    times = re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(error))
    if times is None:
        return f"the initial peers cannot connect to us: {error}"
    ahead_seconds = float(times[1]) - float(times[2])
    direction = "ahead of" if ahead_seconds > 0 else "behind"
    return (
        f"the clock of this machine is {abs(ahead_seconds):.1f} seconds {direction} that of an "
        "initial peer: set it by a time server (3 seconds are allowed)"
    )


def _child_of(p2p: P2P) -> asyncio.subprocess.Process:
    return cast(Any, p2p)._child


async def _stop_p2pd(p2p: P2P) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await p2p.shutdown()
    except TimeoutError:
        _child_of(p2p).kill()
        await _child_of(p2p).wait()


def _quieten_hivemind() -> None:
    """Hand hivemind's messages to whoever set up logging, and only when debugging."""
    use_hivemind_log_handler("nowhere")
    is_debugging = _logger.isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if is_debugging else logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")
