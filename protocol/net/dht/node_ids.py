# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which place in the DHT a node has: the one that follows from its peer id.

hivemind lets every node choose its id, and say what it likes of the ids of others. A single liar
could be all the nodes that are near a key.
"""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any, cast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2


_MAX_NAMED = 20
"""Nodes that hivemind names in an answer."""


def make_node_id(peer_id: PeerID) -> DHTID:
    """Return the id of the node of a peer."""
    return DHTID.generate(source=peer_id.to_bytes())


def distrust(protocol: DHTProtocol) -> None:
    """From now on drop from what nodes answer: nodes with other ids, and any records.

    Records are asked for in another way (see replicas.py), so that nobody asked for these.
    """
    get_stub: Any = protocol.get_stub
    cast(Any, protocol).get_stub = lambda peer_id: _DistrustfulStub(get_stub(peer_id))


class _DistrustfulStub:
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
