"""Swarms in memory, on virtual time: the peers that ship, with real engines or with fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from virtual_time import VirtualClock, VirtualEventLoop

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.pass_queue import PassJob
from shoal.peer.engine.steps import StepWork
from shoal.peer.hosting import hosted_model
from shoal.peer.hosting.hosted_model import HostedModel
from shoal.peer.hosting.span_loader import SpanLoader
from shoal.peer.hosting.throughput import Throughput
from shoal.peer.passes.pass_workload import PassWorkload
from shoal.peer.peer import Peer
from shoal.peer.placement.supply import BlockRoom
from shoal.peer.process.config import MOST_ADAPTER_BYTES, MOST_PASS_BYTES, PeerConfig, PeerEvent
from shoal.peer.sessions.sessions import SessionWorkload
from shoal.peer.streams.service import Service
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import NO_MEMBERSHIP, Membership
from shoal.protocol.net.clock import Clock
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.net.network import Presence
from shoal.protocol.net.transport import StreamServer

MODEL_ID = ModelId("a" * 32)
SPEED = Throughput(decode_steps_per_second=100.0, prefill_tokens_per_second=1000.0)


class HoldingComputeThread(ComputeThread):
    """Keeps virtual time still while the engine computes."""

    def submit(self, work: StepWork, tenant: tuple[str, str] = ("", "")) -> Any:
        return hold_time(super().submit(work, tenant))

    def call(self, function: Callable[[], Any]) -> Any:
        return hold_time(super().call(function))

    def drop_pass(self, job: PassJob) -> None:
        super().drop_pass(job)
        hold_time(job.released)


def hold_time(future: asyncio.Future[Any]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualEventLoop)
    hold = loop.hold()
    hold.__enter__()
    future.add_done_callback(lambda _: hold.__exit__(None, None, None))
    return future


class SceneLoader(SpanLoader):
    """Loads engines, or has one, whose computing takes no virtual time; all are equally fast."""

    def __init__(self, model: HostedModel, clock: Clock, engine: Any = None) -> None:
        super().__init__(model, clock)
        self._engine = engine

    @classmethod
    def open(cls, config: PeerConfig, clock: Clock) -> SceneLoader:
        return cls(replace(HostedModel.open(config), model_id=MODEL_ID), clock)

    @classmethod
    def of_engine(cls, engine: Any) -> Callable[[PeerConfig, Clock], SceneLoader]:
        """Return what opens a loader of an engine that is there, with memory for everything."""

        def open_loader(config: PeerConfig, clock: Clock) -> SceneLoader:
            nothing: Any = None
            sizes = hosted_model.BlockSizes.of_model(engine.spec, WeightFormat.FP32)
            model = _SceneModel(
                config,
                nothing,
                MODEL_ID,
                engine.spec,
                nothing,
                sizes,
                MOST_PASS_BYTES,
                MOST_ADAPTER_BYTES,
            )
            return cls(model, clock, engine)

        return open_loader

    def load(self, span: Any, kept: Mapping[int, Any], on_progress: Any) -> Any:
        return self._engine or super().load(span, kept, on_progress)

    def make_compute_thread(self, engine: Any) -> ComputeThread:
        return HoldingComputeThread(engine)

    def measure(self, engine: Any) -> Throughput:
        return SPEED

    async def measure_again(self, served: Any, is_idle: Any) -> Throughput | None:
        return None


class _SceneModel(HostedModel):
    def read_free_bytes(self) -> int:
        return hosted_model.read_free_bytes()

    def find_room(self) -> BlockRoom:
        return BlockRoom(self.spec.num_blocks)


class MemorySwarm:
    """A network and a directory, and the peers and clients that a test puts there."""

    def __init__(self, link: Link | None = None, membership: Membership = NO_MEMBERSHIP) -> None:
        self.network = LoopbackNetwork(link=link)
        self.store = MemoryDirectoryStore(membership)

    def at(self, host: str) -> MemoryNetwork:
        """Return the network as one host has it."""
        return MemoryNetwork(self.network, self.store, VirtualClock(), host)

    def open_directory(self) -> MemoryDirectory:
        return MemoryDirectory(self.store, VirtualClock())

    @asynccontextmanager
    async def serve(
        self,
        host: str,
        config: PeerConfig,
        open_loader: Callable[[PeerConfig, Clock], SpanLoader] = SceneLoader.open,
        identity: Identity | None = None,
        *,
        is_relayed: bool = False,
    ) -> AsyncGenerator[Inside]:
        """Run a peer, from when it is online to its end; nobody can dial one that is relayed."""
        network = SceneNetwork(self.at(host), is_relayed)
        identity = identity or Identity(host.encode().ljust(32))
        online: asyncio.Future[Inside] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()

        async def run() -> None:
            def watch(event: PeerEvent) -> None:
                if event.name == "online":
                    online.set_result(Inside(peer, network.endpoints[0]))

            joining = Peer.join(
                config, network, VirtualClock(), watch, identity=identity, open_loader=open_loader
            )
            async with joining as peer:
                await peer.serve(stop)

        running = asyncio.create_task(run())
        await asyncio.wait((running, online), return_when=asyncio.FIRST_COMPLETED)
        if not online.done():
            await running  # raises what went wrong
        try:
            yield online.result()
        finally:
            self.network.resume(host)
            stop.set()
            await running


class SceneNetwork:
    """A host, maybe one that only relays reach; here that is a stream like any other."""

    def __init__(self, network: MemoryNetwork, is_relayed: bool) -> None:
        self._network = network
        self._is_relayed = is_relayed
        self.endpoints: list[Endpoint] = []

    async def connect(self) -> tuple[LoopbackTransport, MemoryDirectory]:
        return await self._network.connect()

    async def serve(self, identity: Identity, serve: StreamServer) -> Presence:
        presence = await self._network.serve(identity, serve)
        (endpoint,) = presence.addresses.endpoints
        self.endpoints.append(endpoint)
        if self._is_relayed:
            presence.relays = (Relay(endpoint.host, endpoint.port, identity.peer_id),)
        return presence


class Inside:
    """What is inside a peer that is online, by the names that tests have for it."""

    def __init__(self, peer: Peer, endpoint: Any = None) -> None:
        self.peer = peer
        self.endpoint = endpoint
        """Where it listens, whether or not it says so."""
        assert peer.joined.handler.service is not None
        self.service: Service = peer.joined.handler.service
        workloads = self.service.workloads
        (self.workload,) = (one for one in workloads if isinstance(one, SessionWorkload))
        (self.training,) = (one for one in workloads if isinstance(one, PassWorkload))
        self.admission = self.workload.admission
        self.resources = self.admission.resources
        self.sessions = self.admission.sessions
        self.engine: Any = self.admission.engine
        self.compute: Any = self.admission.compute
        self.prompts = self.resources.prompts
        self.passes = self.training.tensors
        self.peer_id, self.model_id = self.service.host.peer_id, self.service.host.model_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)

    @property
    def num_passes(self) -> int:
        return self.training.num_running

    @property
    def adapters(self) -> Any:
        return self.training.resources.adapter_store

    @adapters.setter
    def adapters(self, adapter_store: Any) -> None:
        self.training.resources.adapter_store = self.resources.adapter_store = adapter_store

    @property
    def pushing(self) -> Any:
        return self.resources.pushing

    @pushing.setter
    def pushing(self, resources: Any) -> None:
        self.resources.pushing = resources

    @property
    def push_links(self) -> Any:
        return self.pushing.links

    @property
    def pending(self) -> Any:
        return self.service.host.pending

    @pending.setter
    def pending(self, pending: Any) -> None:
        self.service.host = replace(self.service.host, pending=pending)
        self.pushing = replace(self.pushing, pending=pending)

    @property
    def clock(self) -> Clock:
        return self.service.host.clock

    @property
    def is_draining(self) -> bool:
        return self.admission.is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        self.admission.is_draining = self.training.is_draining = is_draining

    @property
    def pass_budget(self) -> Any:
        return self.training.resources.budget

    @pass_budget.setter
    def pass_budget(self, budget: Any) -> None:
        self.training.resources.pass_bytes = budget.num_bytes

    @property
    def read_free_bytes(self) -> Any:
        return self.training.resources.read_free_bytes

    @read_free_bytes.setter
    def read_free_bytes(self, read: Any) -> None:
        self.training.resources.read_free_bytes = read


def look_into(peer: Any) -> Inside:
    """Return what is inside a peer of a LoopbackSwarm."""
    return Inside(peer.peer)
