# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A node of the DHT that meets another one hands on the records that belong there.

hivemind hands on whole dictionaries, up to 4 MiB in one message and as often as somebody names
itself by another node id, and looks through all keys in one go.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, cast

from .node_ids import make_node_id
from .record_intake import MAX_STORED_AT_ONCE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.p2p import PeerID

_MAX_HANDED_ON = 1024
"""Records for one newcomer. It gets the others when they are renewed, within half a minute."""

_MAX_AT_ONCE = 8
"""Newcomers that are handed something."""

_Record = tuple[DHTID, str, bytes, float]


class Newcomers:
    """Belongs to one node, and stands in for its `update_routing_table`."""

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._note: Callable[..., Coroutine[Any, Any, None]] = protocol.update_routing_table
        self._num_served = 0

    def watch(self) -> None:
        """From now on have hivemind tell us whom it meets, each time in a task of its own."""
        cast(Any, self._protocol).update_routing_table = self.note

    async def note(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Note that a node has answered or asked something, or has not answered."""
        table = self._protocol.routing_table
        if not responded:
            return await self._note(node_id, peer_id, responded=False)
        if node_id is None or node_id != make_node_id(peer_id):
            return  # nobody asks such a node, see node_ids.py
        is_new = node_id not in table
        doubtful = table.add_or_update_node(node_id, peer_id)
        if doubtful is not None:  # there is a place for somebody new if this one is gone
            await self._protocol.call_ping(doubtful[1])
        if is_new and self._num_served < _MAX_AT_ONCE:
            self._num_served += 1
            try:
                await self._hand_on(node_id, peer_id)
            finally:
                self._num_served -= 1

    async def _hand_on(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Hand on what belongs there, until the newcomer takes no more."""
        records = await self._list_records(node_id)
        random.shuffle(records)
        for start in range(0, min(len(records), _MAX_HANDED_ON), MAX_STORED_AT_ONCE):
            portion = records[start : start + MAX_STORED_AT_ONCE]
            keys, subkeys, values, expiries = zip(*portion, strict=True)
            stored = await self._protocol.call_store(
                peer_id, keys, values, expiries, subkeys=subkeys
            )
            if not stored or not any(stored):
                return

    async def _list_records(self, node_id: DHTID) -> list[_Record]:
        records: list[_Record] = []
        for number, (key, item) in enumerate(list(self._protocol.storage.items()), 1):
            if isinstance(item.value, DictionaryDHTValue) and self._belongs(key, node_id):
                records += [(key, subkey, *entry) for subkey, entry in item.value.items()]
            if number % MAX_STORED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return records

    def _belongs(self, key: DHTID, node_id: DHTID) -> bool:
        """Return whether a newcomer is to have what stands under a key, and that from us.

        Of all that have it, the nearest to the key hands it on.
        """
        nearest = self._protocol.routing_table.get_nearest_neighbors(
            key, self._protocol.num_replicas
        )
        near = [found for found, _ in nearest]
        ours = key ^ self._protocol.node_id
        return node_id in near and all(ours < key ^ found for found in near if found != node_id)
