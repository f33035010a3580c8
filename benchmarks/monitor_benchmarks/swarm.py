"""The swarm that a monitor watches, in a process of its own: `load.py` and `traffic.py` start it.

It says where it can be joined, and how long announcements are on the average; it ends with stdin.
"""

import asyncio
import gc
import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from statistics import mean

from measuring.crowd import Crowd
from shoal.client.routing.route_finder import SwarmModel
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

MODEL = SwarmModel(ModelId("a" * 32), num_blocks=80, hidden_size=1)
NUM_SPANS = 8
FIRST_PORT = 20000
"""Of the peers. Nodes of the DHT take any free ports, and those lie elsewhere."""

_CLOCK = SystemClock()


async def _run(host: str, num_peers: int, num_nodes: int) -> None:
    async with AsyncExitStack() as stack:
        nodes: list[HivemindDirectory] = []
        for number in range(num_nodes):
            node = await HivemindDirectory.join(
                nodes[0].addresses if nodes else (),
                identity=Identity(number.to_bytes(32)),
                clock=_CLOCK,
                listen_host=host,
            )
            stack.push_async_callback(node.close)
            nodes.append(node)
        books = [node.records for node in nodes]
        ports = range(FIRST_PORT, FIRST_PORT + num_peers)
        crowd = Crowd(num_peers, MODEL, books, lambda number: (host, ports[number]), NUM_SPANS)
        transport = crowd.open_transport(stack)
        for number, port in enumerate(ports):
            await transport.listen(host, port, partial(crowd.serve, number))
        await crowd.announce_all(stack)
        known = crowd.records.list_records(MODEL.model_id, _CLOCK.wall())
        addresses = [node.addresses[0] for node in nodes]
        print(json.dumps([addresses, mean(len(one.value) for one in known)]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    gc.freeze()
    asyncio.run(_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
