"""The monitor that `traffic.py` measures, in a process and a network namespace of its own.

For each line it says how many peers it knows, and how many bytes its network has carried.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from shoal.client.monitor.access import make_access
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import ProbeResult
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement

_DEVICE = Path("/sys/class/net/eth0/statistics")


async def _watch(addresses: Sequence[str]) -> None:
    access = make_access(None)

    async def answer(peer: Announcement, transport: Transport) -> ProbeResult:
        return ProbeResult(access.clock.wall(), rtt_seconds=0.01)

    with closing(History(None, 3600.0, access.clock.wall())) as history:
        monitor = Monitor(replace(access, probe=answer), history)
        watching = asyncio.create_task(monitor.run(addresses))
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(_count(monitor)), flush=True)
        watching.cancel()
        await asyncio.wait([watching])


def _count(monitor: Monitor) -> dict[str, int]:
    num_peers = sum(len(model.peers) for model in monitor.state.models.values())
    received, sent = (int((_DEVICE / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
    return {"peers": num_peers, "received": received, "sent": sent}


if __name__ == "__main__":
    gc.freeze()
    asyncio.run(_watch(sys.argv[1:]))
