# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A node of hivemind's DHT that finds other nodes, and stores nothing.

Records are exchanged over a protocol of our own, see `HivemindDirectory`. This module bounds what
strangers may ask of a node, and believes no node about the ids of others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

from ...errors import DirectoryError, ErrorCode, RefusedError, RemoteProtocolError
from ...fair_share import BUSY_SECONDS, RecentCosts
from ..libp2p.hivemind_packages import importing_hivemind
from ..libp2p.multiaddrs import PeerAddress
from ..libp2p.swarm_question import make_silence_error

with importing_hivemind():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol, ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils.logging import use_hivemind_log_handler

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

_logger = logging.getLogger(__name__)

# With those of p2p_daemon.py, it keeps a join that cannot succeed below ten seconds.
_JOIN_ANSWER_SECONDS = 3.0
# How long one neighbour may keep an operation waiting before it counts as gone.
_ANSWER_SECONDS = 1.5

_NODE_OPTIONS: dict[str, Any] = {
    "num_workers": 16,  # dead neighbours are found out side by side, not one after the other
    "blacklist_time": 10.0,
    "wait_timeout": _JOIN_ANSWER_SECONDS,
}

_MAX_NAMED = 20
"""Nodes that hivemind names in an answer."""

MAX_KEYS = 16
"""Keys of one question for neighbours; we ask for one at a time."""

MAX_FIND_BYTES = 2**14
"""Of one question: hivemind's own may have more keys than we look up, and is answered still."""

MOST_QUESTIONS, CERTAIN_QUESTIONS = 5000, 100
"""Of all strangers in ten seconds, and of each whatever others ask, where each key counts as one:
0.2 ms each, 10 % of a core."""

_PING, _STORE, _FIND = (f"DHTProtocol.rpc_{name}" for name in ("ping", "store", "find"))


async def start_node(p2p: P2P, initial_peers: Sequence[PeerAddress], client_mode: bool) -> DHTNode:
    """Start a node over a p2pd. Raises DirectoryError when no initial peer wants us."""
    node_id = make_node_id(cast(Any, p2p).peer_id)
    node = await DHTNode.create(p2p=p2p, node_id=node_id, client_mode=client_mode, **_NODE_OPTIONS)
    harden(node.protocol)
    if not client_mode:
        bound_questions(node.protocol, cast(Any, p2p)._client.control.unary_handlers)
    await _meet(node, initial_peers)
    node.protocol.wait_timeout = _ANSWER_SECONDS
    return node


async def _meet(node: DHTNode, initial_peers: Sequence[PeerAddress]) -> None:
    """Greet the initial peers. Given them, hivemind would lose the errors of all but one."""
    pings = [
        node.protocol.call_ping(PeerID.from_base58(peer.peer_id), validate=True, strict=True)
        for peer in initial_peers
    ]
    answers = await asyncio.gather(*pings, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, ValidationError):
            raise DirectoryError(_explain(answer)) from answer
    if initial_peers and not any(isinstance(answer, DHTID) for answer in answers):
        raise make_silence_error(initial_peers)
    await asyncio.sleep(0)  # the answers enter the routing table in tasks of their own


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

    Nor does a node hand anything to new nodes, as hivemind's would.
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


def bound_questions(protocol: DHTProtocol, handlers: dict[str, Any]) -> None:
    """From now on store nothing, and answer a bounded number of questions, each for few keys.

    hivemind answers for any number of keys, with all that stands under them.
    """
    hivemind_ping, budget = handlers[_PING], RecentCosts(MOST_QUESTIONS, 10.0, CERTAIN_QUESTIONS)

    def check_budget(sender: PeerID, num_questions: int = 1) -> None:
        if not budget.take(str(sender), num_questions, asyncio.get_running_loop().time()):
            raise RefusedError(ErrorCode.BUSY, "you ask too many questions", BUSY_SECONDS)

    async def ping(message: bytes, sender: PeerID) -> bytes:
        check_budget(sender)
        return await hivemind_ping(message, sender)

    async def store(_: bytes, sender: PeerID) -> bytes:
        raise RemoteProtocolError("records are not stored in this way")

    async def find(message: bytes, sender: PeerID) -> bytes:
        if len(message) > MAX_FIND_BYTES:
            raise RemoteProtocolError("there are too many keys in one question")
        request = dht_pb2.FindRequest.FromString(message)
        check_budget(sender, max(1, len(request.keys)))
        if request.peer.node_id:
            greeting = dht_pb2.PingRequest(peer=request.peer)
            local_id: Any = protocol.p2p.peer_id
            await protocol.rpc_ping(greeting, P2PContext(_FIND, local_id, remote_id=sender))
        asker = DHTID.from_bytes(request.peer.node_id)
        results = [_find_near(protocol, key, asker) for key in request.keys[:MAX_KEYS]]
        results += [dht_pb2.FindResult()] * (len(request.keys) - MAX_KEYS)  # else hivemind fails
        answer = dht_pb2.FindResponse(results=results, peer=protocol.node_info)
        return answer.SerializeToString()

    handlers.update({_PING: ping, _STORE: store, _FIND: find})


def _find_near(protocol: DHTProtocol, key: bytes, asker: DHTID) -> Any:
    nearest = protocol.routing_table.get_nearest_neighbors(
        DHTID.from_bytes(key), protocol.bucket_size, exclude=asker
    )
    return dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND,
        nearest_node_ids=[node_id.to_bytes() for node_id, _ in nearest],
        nearest_peer_ids=[peer_id.to_bytes() for _, peer_id in nearest],
    )
