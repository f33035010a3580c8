"""The run beside a model that is served: it is looked for, and its peer serves meanwhile."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from memory_swarm import MemorySwarm
from run_swarm import OWNER
from service_scene import HELLO, Talk
from training_runs import open_run
from virtual_time import VirtualClock, run_virtual

from shoal.cli.training.serve_training import SideRun
from shoal.peer.operating.run_figures import RunFigures
from shoal.peer.process.config import PeerConfig, PeerEvent, ignore
from shoal.peer.runs import run_peer
from shoal.peer.runs.run_peer import RunPeer, training_beside
from shoal.peer.runs.run_resources import RunPeerConfig
from shoal.peer.streams.service import JoinedPeer
from shoal.protocol.errors import DirectoryError
from shoal.protocol.identity import Identity
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.runs.run_record import RunRecord, sign_run
from shoal.protocol.spans import Span

NAMED = {"name": "test", "owner": OWNER.peer_id}


class Beside:
    """A peer that serves a model, and takes part in the run `test` as soon as somebody shows it."""

    def __init__(self, folder: Path) -> None:
        options = argparse.Namespace(
            run_file=Path("test"), corpus=folder, stage=1, new_run=False, new_swarm=False, admit=[],
            run_threads=1, announce_period=30.0, silence=10.0, linger=1.0, end_with_stdin=False,
        )  # fmt: skip
        self.swarm = MemorySwarm()
        self.side_run = SideRun(options)
        self.run_figures = RunFigures()
        self.events: list[PeerEvent] = []

    async def begin(self, stack: AsyncExitStack, directory: Path) -> None:
        """Serve, and look for the run."""
        clock, config = VirtualClock(), PeerConfig(str(directory), Span(0, 2), drain_seconds=0.0)
        network, identity = self.swarm.at("beside"), Identity(bytes(32))
        assert await self.side_run.prepare(network, identity, clock) == 0
        serving = self.swarm.serve("beside", config, identity=identity)
        inside = await stack.enter_async_context(serving)
        joined = inside.peer.joined
        training = training_beside(
            joined,
            partial(self.side_run.find_config, joined.presence, clock),
            clock,
            asyncio.Event(),
            self.note,
            may_leave=True,
        )
        await stack.enter_async_context(training)
        await asyncio.sleep(60.0)
        assert self.list_events() == ["waiting_for"]
        client = LoopbackTransport(self.swarm.network, "client")
        stack.push_async_callback(client.close)
        talk = Talk(await client.open_stream(inside.endpoint))
        assert isinstance(await talk.ask(HELLO), Welcome)

    def note(self, event: PeerEvent) -> None:
        self.run_figures.note(event)
        self.events.append(event)

    async def found(self, stack: AsyncExitStack, record: RunRecord, folder: Path) -> RunPeer:
        """Begin the run at another peer."""
        clock, network = VirtualClock(), self.swarm.at("founder")
        config = RunPeerConfig(record, folder, (0,), founds_run=True)
        resources = await stack.enter_async_context(run_peer.open_run(config, clock))
        joining = JoinedPeer.join(network, OWNER, clock, ignore)
        joined = await stack.enter_async_context(joining)
        return await stack.enter_async_context(RunPeer.join(joined, resources, clock))

    def list_events(self) -> list[str]:
        """Return the names of the events of the run."""
        return [event.name for event in self.events]


def test_peer_serves_until_its_run_is_shown_and_trains_then(
    tiny_models: Any, tmp_path: Path
) -> None:
    run, _ = open_run(tmp_path)
    beside = Beside(tmp_path)

    async def scene() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(600.0):
            await beside.begin(stack, tiny_models.get().directory)
            founder = await beside.found(stack, sign_run(OWNER, run, []), tmp_path)
            await founder.serve(founder.loop.is_over.wait())
            while "trained" not in beside.list_events():  # noqa: ASYNC110 - a test on virtual time
                await asyncio.sleep(1.0)

    run_virtual(scene())

    (training,) = [event.facts for event in beside.events if event.name == "training"]
    assert training.items() >= NAMED.items()
    progress = beside.run_figures.progress["run"]
    assert (progress["name"], progress["update"]) == ("test", run.num_updates)
    assert progress["num_updates"] == run.num_updates


def test_peer_that_waits_for_its_run_leaves_at_once(tiny_models: Any, tmp_path: Path) -> None:
    open_run(tmp_path)
    beside = Beside(tmp_path)

    async def scene() -> None:
        async with asyncio.timeout(600.0), AsyncExitStack() as stack:
            await beside.begin(stack, tiny_models.get().directory)

    run_virtual(scene())

    assert beside.list_events() == ["waiting_for"]


def test_run_that_does_not_admit_the_peer_is_told_and_the_peer_serves_on(
    tiny_models: Any, tmp_path: Path
) -> None:
    run, _ = open_run(tmp_path)
    beside = Beside(tmp_path)

    async def scene() -> None:
        async with asyncio.timeout(600.0), AsyncExitStack() as stack:
            await beside.begin(stack, tiny_models.get().directory)
            record = sign_run(OWNER, run, [OWNER.peer_id])
            founder = await beside.found(stack, record, tmp_path)
            await founder.serve(asyncio.sleep(60.0))

    run_virtual(scene())

    assert beside.list_events() == ["waiting_for", "training_stopped"]
    assert "does not admit this peer" in str(beside.events[-1].facts["why"])


def test_swarm_that_does_not_answer_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    class Silent(MemoryNetwork):
        async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
            raise DirectoryError("no peer of the directory answers")

    open_run(tmp_path)
    beside, clock = Beside(tmp_path), VirtualClock()
    network = Silent(beside.swarm.network, beside.swarm.store, clock, "beside")

    preparing = beside.side_run.prepare(network, Identity(bytes(32)), clock)

    assert run_virtual(preparing) == 0
