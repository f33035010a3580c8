# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Bounds on what strangers have a DHT node store and look up, in bounded time for each message.

hivemind checks all records of a message in one go, and answers for any number of keys, with all
that stands under them: one message of 4 MiB held up the event loop, and the sessions on it, for
seconds.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Hashable
from typing import Any, cast
from weakref import WeakValueDictionary

from ...errors import RemoteProtocolError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.proto import dht_pb2

WINDOW_SECONDS = 10.0
"""In which a check takes 0.2 ms for each record, and whoever sends decides how many there are."""

MAX_RECORDS = 2000
"""Records of a window that are checked, of all senders together: 4 % of a core. A peer announces
itself every 30 s, so this is enough for 6,000 that have the same five nodes near their key."""

NUM_FOR_CERTAIN = 8
"""Records of each sender that are checked whatever others send. An announcement needs one place,
the list of the owner another one. Who comes as many senders pays a TLS handshake for each, which
costs about as much as these checks."""

MAX_STORED_AT_ONCE = 32
"""Records of one message; it takes 7 ms to check them, and then others get their turn. A peer that
announces itself sends one, and a node that hands on what it keeps as many messages as it needs."""

MAX_STORE_BYTES = 128 * 2**10
"""Of one message: more than so many records of the largest size take."""

MAX_KEYS = 16
"""Keys of one question for neighbours; we ask for one at a time."""

MAX_FIND_BYTES = 2**14
"""Of one question: hivemind's own may have more keys than we look up, and is answered still."""

_STORE, _FIND = "DHTProtocol.rpc_store", "DHTProtocol.rpc_find"


class RecordIntake:
    """Stands before a node's own handlers. Who is refused hears "not stored", not an error: nodes
    of hivemind would take that for the end of this one."""

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
        """Answer a FindRequest with a FindResponse: who is near to each key.

        What stands there is asked for in another way, see replicas.py. Raises RemoteProtocolError.
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
