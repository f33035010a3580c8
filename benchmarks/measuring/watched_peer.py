"""A peer of all blocks in a process of its own, on one core, which samples the lag of its loop.

It is the `Peer` that `shoal serve` runs, on the same kind of loop. It says where it is, then
answers each line with the lags since the last one.
"""

import asyncio
import gc
import json
import os
import sys
import time

import uvloop

from shoal.peer.peer import Peer
from shoal.peer.process.config import PeerConfig, PeerEvent
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.internet import InternetNetwork
from shoal.protocol.spans import Span

_SAMPLE_SECONDS = 0.01
"""Often, so that a few seconds have a 99th percentile."""


async def _serve(directory: str, num_blocks: int) -> None:
    facts: dict[str, object] = {"pid": os.getpid()}
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    lags: list[float] = []

    def note(event: PeerEvent) -> None:
        facts.update(event.facts)
        if event.name == "online":
            answering.append(loop.create_task(_answer(lags, stop)))
            print(json.dumps(facts), flush=True)

    answering: list[asyncio.Task[None]] = []
    sampling = loop.create_task(_sample(lags))
    config = PeerConfig(directory, Span(0, num_blocks), num_threads=1)
    clock = SystemClock()
    async with Peer.join(config, InternetNetwork(clock), clock, note) as peer:
        await peer.serve(stop)
    sampling.cancel()
    await asyncio.gather(*answering)


async def _sample(lags: list[float]) -> None:
    while True:
        due_at = time.monotonic() + _SAMPLE_SECONDS
        await asyncio.sleep(_SAMPLE_SECONDS)
        lags.append(time.monotonic() - due_at)


async def _answer(lags: list[float], stop: asyncio.Event) -> None:
    """Tell the lags for each line, until there are no more lines."""
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(lags), flush=True)
        lags.clear()
    stop.set()


def _main(directory: str, num_blocks: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(directory, int(num_blocks)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
