# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A node of hivemind's DHT that keeps and believes nothing but what passes our gate.

This module adds the checks that hivemind lacks: `GateValidator` asks the gate before storing,
`RecordIntake` bounds what strangers may have checked and looked up, and `harden` believes no node
about the ids of others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, cast
from weakref import WeakValueDictionary

from ...errors import DirectoryError, RemoteProtocolError
from ...membership.membership import Membership
from ..clock import Clock
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.swarm_question import make_silence_error
from .record_gate import RecordGate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol, ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

_logger = logging.getLogger(__name__)

# With those of p2p_daemon.py, it keeps a join that cannot succeed below ten seconds.
_JOIN_ANSWER_SECONDS = 3.0
# How long one neighbour may keep an operation waiting before it counts as gone.
_ANSWER_SECONDS = 1.5

_NODE_OPTIONS: dict[str, Any] = {
    # Reads must be fresh, and nobody shall fill our memory with what we did not ask for.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    "cache_size": -1,  # or a single record that a stranger puts there would hide all others
    "reuse_get_requests": False,
    "num_workers": 16,  # dead neighbours are found out side by side, not one after the other
    "blacklist_time": 10.0,
    "wait_timeout": _JOIN_ANSWER_SECONDS,
}

_MAX_NAMED = 20
"""Nodes that hivemind names in an answer."""

WINDOW_SECONDS = 10.0
"""A message in which checking takes 0.2 ms per record, and the sender decides their number."""

MAX_RECORDS = 2000
"""Records of a window that are checked, of all senders together: 4 % of a core. A peer announces
itself every 30 s, so this is enough for 6,000 that have the same five nodes near their key."""

NUM_FOR_CERTAIN = 8
"""Records of each sender that are checked whatever others send. An announcement needs one place,
the list of the owner another one. An attacker with many identities pays a TLS handshake for each,
which costs about as much as these checks."""

MAX_STORED_AT_ONCE = 32
"""Records of one message; it takes 7 ms to check them, and then others get their turn. A peer that
announces itself sends one, and nodes of older versions hand on what they keep in such portions."""

MAX_STORE_BYTES = 128 * 2**10
"""Of one message: more than so many records of the largest size take."""

MAX_KEYS = 16
"""Keys of one question for neighbours; we ask for one at a time."""

MAX_FIND_BYTES = 2**14
"""Of one question: hivemind's own may have more keys than we look up, and is answered still."""

_STORE, _FIND = "DHTProtocol.rpc_store", "DHTProtocol.rpc_find"


class GateValidator(RecordValidatorBase):
    """Makes hivemind ask our gate before it stores anything."""

    def __init__(self, gate: RecordGate) -> None:
        self._gate = gate

    def validate(self, record: DHTRecord) -> bool:
        return self._gate.accept(record.key, record.subkey, record.value, record.expiration_time)


def make_gate(membership: Membership, clock: Clock) -> RecordGate:
    """Return a gate for all records that nodes store or find, one after the other."""
    return RecordGate(
        membership,
        clock,
        lambda key: DHTID.generate(source=key).to_bytes(),
        MSGPackSerializer.dumps,
    )


async def start_node(
    p2p: P2P, gate: RecordGate, initial_peers: Sequence[PeerAddress], client_mode: bool
) -> DHTNode:
    """Start a node over a p2pd. Raises DirectoryError when no initial peer wants us."""
    try:
        node = await DHTNode.create(
            p2p=p2p,
            node_id=make_node_id(cast(Any, p2p).peer_id),
            initial_peers=[f"/p2p/{peer.peer_id}" for peer in initial_peers],
            client_mode=client_mode,
            record_validator=GateValidator(gate),
            **_NODE_OPTIONS,
        )
    except ValidationError as error:
        raise DirectoryError(_explain(error)) from error
    except RuntimeError as error:  # none of them responded
        raise make_silence_error(initial_peers) from error

    def forget(key: str, peer_id: str) -> None:
        stored: Any = node.protocol.storage.get(DHTID.generate(source=key))
        if stored is not None:
            del stored.value[peer_id]

    gate.when_displaced(forget)
    node.protocol.wait_timeout = _ANSWER_SECONDS
    harden(node.protocol)
    if not client_mode:
        RecordIntake(node.protocol, gate.wall).open(p2p)
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
        "initial peer: synchronise it with a time server (3 seconds are allowed)"
    )


def quieten_hivemind() -> None:
    """Pass hivemind's messages to the configured logging, and only when debugging."""
    use_hivemind_log_handler("nowhere")
    is_debugging = _logger.isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if is_debugging else logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")


def make_node_id(peer_id: PeerID) -> DHTID:
    """Return the id of the node of a peer: the only one that it may have.

    hivemind lets every node choose its id, and say what it likes of the ids of others. A single
    liar could be all the nodes that are near a key.
    """
    return DHTID.generate(source=peer_id.to_bytes())


def harden(protocol: DHTProtocol) -> None:
    """From now on drop from what nodes answer: nodes with other ids, and any records.

    Records are asked for in another way (see `Replicas`), so that nobody asked for these. And none
    are handed to new nodes, to which hivemind would send whole dictionaries, up to 4 MiB at once,
    as often as they name themselves by another id: those get what is renewed, within half a minute.
    """
    hivemind: Any = protocol
    get_stub, update_table = hivemind.get_stub, hivemind.update_routing_table

    async def note_node(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Note that a node has answered or asked something, or has not answered."""
        if not responded:
            await update_table(node_id, peer_id, responded=False)
        elif node_id is not None and node_id == make_node_id(peer_id):  # nobody asks any other
            doubtful = protocol.routing_table.add_or_update_node(node_id, peer_id)
            if doubtful is not None:  # there is a place for somebody new if this one is gone
                await protocol.call_ping(doubtful[1])

    hivemind.get_stub = lambda peer_id: _CheckingStub(get_stub(peer_id))
    hivemind.update_routing_table = note_node


class _CheckingStub:
    """Through which hivemind asks one node."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_find(self, request: Any, **options: Any) -> Any:
        """Do what hivemind's stub does, and drop what cannot be believed."""
        answer = await self._stub.rpc_find(request, **options)
        results = answer.results[: len(request.keys)]
        return dht_pb2.FindResponse(results=map(_reduce, results), peer=answer.peer)


def _reduce(result: Any) -> Any:
    named = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
    true = [
        (node_id, peer_id)
        for node_id, peer_id in islice(named, _MAX_NAMED)
        if DHTID.generate(source=peer_id).to_bytes() == node_id
    ]
    return dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND,
        nearest_node_ids=[node_id for node_id, _ in true],
        nearest_peer_ids=[peer_id for _, peer_id in true],
    )


class RecordIntake:
    """Bounds the time of each message that strangers send to a node: stands before its handlers.

    hivemind checks all records of a message in one go, and answers for any number of keys, with
    all that stands under them: one message of 4 MiB held up the event loop, and the sessions on
    it, for seconds. A refused sender hears "not stored", not an error: nodes of hivemind would take
    that for the end of this one.
    """

    def __init__(self, protocol: DHTProtocol, now: Callable[[], float]) -> None:
        self._protocol = protocol
        self._now = now
        self._budget = StoreBudget()
        self._turn = asyncio.Lock()
        # Each sender waits for one turn at a time, so that none waits behind the many of another.
        self._turns: WeakValueDictionary[PeerID, asyncio.Lock] = WeakValueDictionary()

    def open(self, p2p: P2P) -> None:
        """From now on take what reaches a p2pd, in place of hivemind's own handlers."""
        handlers = cast(Any, p2p)._client.control.unary_handlers
        handlers[_STORE], handlers[_FIND] = self.store, self.find

    async def store(self, message: bytes, sender: PeerID) -> bytes:
        """Answer a StoreRequest with a StoreResponse; store what passes the gate."""
        if len(message) > MAX_STORE_BYTES:
            return self._refuse(0)
        request = dht_pb2.StoreRequest.FromString(message)
        num_records = len(request.keys)
        if not self._may_check(request) or not self._take(sender, num_records):
            return self._refuse(num_records)
        turns = self._turns.setdefault(sender, asyncio.Lock())
        async with turns, self._turn:
            answer = await self._protocol.rpc_store(request, self._name(_STORE, sender))
            await asyncio.sleep(0)
        return answer.SerializeToString()

    async def find(self, message: bytes, sender: PeerID) -> bytes:
        """Answer a FindRequest with a FindResponse: the nodes near to each key.

        What stands there is asked for in another way, see `Replicas`. Raises RemoteProtocolError.
        """
        if len(message) > MAX_FIND_BYTES:
            raise RemoteProtocolError("there are too many keys in one question")
        request = dht_pb2.FindRequest.FromString(message)
        if request.peer.node_id:
            ping = dht_pb2.PingRequest(peer=request.peer)
            await self._protocol.rpc_ping(ping, self._name(_FIND, sender))
        asker = DHTID.from_bytes(request.peer.node_id)
        results = [self._find(DHTID.from_bytes(key), asker) for key in request.keys[:MAX_KEYS]]
        results += [dht_pb2.FindResult()] * (len(request.keys) - MAX_KEYS)  # else hivemind fails
        answer = dht_pb2.FindResponse(results=results, peer=self._protocol.node_info)
        return answer.SerializeToString()

    def _find(self, key_id: DHTID, asker: DHTID) -> Any:
        protocol = self._protocol
        nearest = protocol.routing_table.get_nearest_neighbors(
            key_id, protocol.bucket_size, exclude=asker
        )
        return dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[node_id.to_bytes() for node_id, _ in nearest],
            nearest_peer_ids=[peer_id.to_bytes() for _, peer_id in nearest],
        )

    def _may_check(self, request: Any) -> bool:
        """Return whether a message is what nodes send; no whole dictionaries, one record each."""
        fields = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        return (
            0 < len(request.keys) <= MAX_STORED_AT_ONCE
            and all(len(field) == len(request.keys) for field in fields)
            and self._protocol.IS_DICTIONARY not in request.subkeys
        )

    def _take(self, sender: PeerID, num_records: int) -> bool:
        return self._budget.take(sender, num_records, self._now())

    def _refuse(self, num_records: int) -> bytes:
        peer = self._protocol.node_info
        return dht_pb2.StoreResponse(store_ok=[False] * num_records, peer=peer).SerializeToString()

    def _name(self, handler: str, sender: PeerID) -> P2PContext:
        local_id: Any = self._protocol.p2p.peer_id
        return P2PContext(handle_name=handler, local_id=local_id, remote_id=sender)


class StoreBudget:
    """Counts what each sender had checked in the current window; nobody gets more than stays free.

    >>> budget = StoreBudget()
    >>> budget.take("greedy", MAX_RECORDS // 2, now=0.0), budget.take("greedy", 1, now=1.0)
    (True, False)
    >>> budget.take("other", MAX_RECORDS // 4, now=1.0), budget.take("other", 1, now=1.0)
    (True, False)
    >>> budget.take("greedy", 1, now=WINDOW_SECONDS)
    True
    """

    def __init__(self) -> None:
        self._begun_at = float("-inf")
        self._taken: dict[Hashable, int] = {}
        self._num_taken = 0

    def take(self, sender: Hashable, num_records: int, now: float) -> bool:
        """Return whether a sender may have so many records checked now, and count them then."""
        if not 0 <= now - self._begun_at < WINDOW_SECONDS:
            self._begun_at, self._taken, self._num_taken = now, {}, 0
        num_before = self._taken.get(sender, 0)
        num_after = num_before + num_records
        share = (MAX_RECORDS - (self._num_taken - num_before)) // 2
        if num_after > max(share, NUM_FOR_CERTAIN):
            return False
        self._taken[sender] = num_after
        self._num_taken += num_records
        return True
