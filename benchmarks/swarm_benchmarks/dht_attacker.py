# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportAttributeAccessIssue=false
"""A stranger who asks a peer's node of the DHT as fast as its p2pd carries it.

One identity, with a p2pd of its own on the same core. Each line on stdin names the attack, or
nothing: then the process keeps its core busy. It is answered with how many answers came during what
went before.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from secrets import token_bytes
from typing import Any

from shoal.protocol.net.libp2p.hivemind_packages import importing_hivemind
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.libp2p.p2p_daemon import start_reading_p2pd, stop_p2pd
from swarm_benchmarks.attacker import spin

with importing_hivemind():
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
    from hivemind.proto import dht_pb2

DHT_QUESTIONS = "DHT questions"

_NUM_IN_FLIGHT = 4000
_KEY_BYTES = 20


async def _flood(client: Any, node: PeerID, counts: list[int]) -> None:
    asking = (_ask_on(client, node, counts) for _ in range(_NUM_IN_FLIGHT))
    await asyncio.gather(*asking, return_exceptions=True)


async def _ask_on(client: Any, node: PeerID, counts: list[int]) -> None:
    """Ask for the neighbours of a key again and again, while p2pd carries it."""
    while True:
        question = dht_pb2.FindRequest(keys=[token_bytes(_KEY_BYTES)]).SerializeToString()
        with contextlib.suppress(P2PHandlerError):  # a refusal is an answer
            await client.call_unary_handler(node, "DHTProtocol.rpc_find", question)
        counts[0] += 1


async def _attack(address: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    target = PeerAddress.parse(address)
    node = PeerID.from_base58(target.peer_id)
    p2p: Any = await start_reading_p2pd([target], None)
    line, counts = "nothing", [0]
    try:
        while line:
            print(json.dumps(counts[0]), flush=True)
            name = line.strip()
            counts, is_over = [0], threading.Event()
            doing = asyncio.create_task(
                _flood(p2p._client, node, counts)
                if name == DHT_QUESTIONS
                else asyncio.to_thread(spin, is_over)
            )
            line = await asyncio.to_thread(sys.stdin.readline)
            is_over.set()
            doing.cancel()
            await asyncio.wait([doing])
    finally:
        await stop_p2pd(p2p)


if __name__ == "__main__":
    asyncio.run(_attack(*sys.argv[1:]))
