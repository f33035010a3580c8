"""A process that trains a stage as `shoal train` does, and tells more: what it computes, and when.

Run as a module by `Member`. It prints JSON objects, each with a time of `time.perf_counter`, which
is one clock for all processes of a machine, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from shoal.peer.process.config import PeerEvent
from shoal.peer.runs.run_peer import RunPeer, open_run
from shoal.peer.runs.run_resources import Compute, RunPeerConfig, make_compute
from shoal.peer.streams.service import JoinedPeer
from shoal.protocol.identity import Identity
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.internet import InternetNetwork, Listening
from shoal.protocol.runs.run_record import read_run_record
from shoal.protocol.runs.training_run import PartId
from training_benchmarks.members import RECORD, MemberSettings


def _tell(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "at": time.perf_counter(), **facts}), flush=True)


def _report(event: PeerEvent) -> None:
    _tell(event.name, **event.facts)


def _watch(compute: Compute) -> Compute:
    """Return what computes, and tells the name, the part and the times of each thing."""

    async def watched(function: Callable[[], Any]) -> Any:
        begun_at = time.perf_counter()
        method: Any = getattr(function, "func", function)
        arguments: tuple[object, ...] = getattr(function, "args", ())
        part = next((one for one in arguments if isinstance(one, PartId)), None)
        about = {} if part is None else {"update": part.update, "index": part.index}
        result = await compute(function)
        _tell("computed", what=method.__qualname__, begun_at=begun_at, **about)
        return result

    return watched


async def _train(settings: MemberSettings, stack: ExitStack) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), task.cancel)
    folder, clock = Path(settings.folder), SystemClock()
    config = RunPeerConfig(
        read_run_record((folder / RECORD).read_bytes()), folder, (settings.stage,),
        founds_run=not settings.addresses, silence_seconds=settings.silence_seconds,
        linger_seconds=settings.linger_seconds,
    )  # fmt: skip
    if not settings.keeps_graphs:
        config = replace(config, graph_bytes=0)
    network = InternetNetwork(clock, settings.addresses, None, Listening(settings.host))
    compute = make_compute(stack)
    if settings.tells_work:
        compute = _watch(compute)
    async with (
        open_run(config, clock, compute=compute) as resources,
        JoinedPeer.join(network, Identity.generate(), clock, _report) as joined,
        RunPeer.join(joined, resources, clock, _report) as peer,
    ):

        async def finish() -> None:
            await peer.loop.is_over.wait()
            if peer.loop.failure is None:
                _, digest = await peer.loop.fetch_weights()
                _tell("trained", digest=digest)
            await peer.linger()

        await peer.serve(finish())


def _main() -> None:
    torch.set_num_threads(1)
    settings = MemberSettings(**json.loads(sys.argv[1]))
    with (
        suppress(asyncio.CancelledError),
        ExitStack() as stack,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_train(settings, stack))


if __name__ == "__main__":
    _main()
