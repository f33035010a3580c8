"""The monitor that `traffic.py` measures, in a process and a network namespace of its own.

For each line it says how many peers it knows, and how many bytes its network has carried: all, and
those to and from peers that it has asked; the others are those of the DHT.
"""

import asyncio
import gc
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from monitor_benchmarks.swarm import FIRST_PORT
from shoal.client.monitor.access import make_access
from shoal.client.monitor.history import History
from shoal.client.monitor.monitor import Monitor
from shoal.client.monitor.state import ProbeResult
from shoal.protocol.net.transport import Transport
from shoal.protocol.records.announcements import Announcement

_DEVICE = Path("/sys/class/net/eth0/statistics")
_ALL_PROTOCOLS = 3  # ETH_P_ALL of linux/if_ether.h
_OUTGOING = 4  # PACKET_OUTGOING of linux/if_packet.h
_HEADER_BYTES = 38
"""Of Ethernet and IPv4 without options, and both ports."""


class PeerTraffic:
    """Counts the bytes of packets to and from peers, on the running loop."""

    def __init__(self, num_peers: int) -> None:
        self._ports = range(FIRST_PORT, FIRST_PORT + num_peers)
        self.num_bytes = Counter[bool]()
        """Those received, and under True those sent."""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
        self._socket.bind(("eth0", _ALL_PROTOCOLS))
        asyncio.get_running_loop().add_reader(self._socket, self._take)

    def _take(self) -> None:
        header = bytearray(_HEADER_BYTES)
        length, address = self._socket.recvfrom_into(header, flags=socket.MSG_TRUNC)
        is_sent = address[2] == _OUTGOING
        source, target = struct.unpack_from("!HH", header, _HEADER_BYTES - 4)
        if (target if is_sent else source) in self._ports:
            self.num_bytes[is_sent] += length

    def close(self) -> None:
        """Count no more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


async def _watch(num_peers: int, addresses: Sequence[str]) -> None:
    access = make_access(None)

    async def answer(peer: Announcement, transport: Transport) -> ProbeResult:
        return ProbeResult(access.clock.wall(), rtt_seconds=0.01)

    with (
        closing(PeerTraffic(num_peers)) as traffic,
        closing(History(None, 3600.0, access.clock.wall())) as history,
    ):
        monitor = Monitor(replace(access, probe=answer), history)
        watching = asyncio.create_task(monitor.run(addresses))
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(_count(monitor, traffic)), flush=True)
        watching.cancel()
        await asyncio.wait([watching])


def _count(monitor: Monitor, traffic: PeerTraffic) -> dict[str, int]:
    num_peers = sum(len(model.peers) for model in monitor.state.models.values())
    received, sent = (int((_DEVICE / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
    from_peers, to_peers = traffic.num_bytes[False], traffic.num_bytes[True]
    return {
        "peers": num_peers,
        "received": received,
        "sent": sent,
        "from peers": from_peers,
        "to peers": to_peers,
    }


if __name__ == "__main__":
    gc.freeze()
    asyncio.run(_watch(int(sys.argv[1]), sys.argv[2:]))
