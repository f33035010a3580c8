"""A loopback swarm seen from inside of its event loop, with peers that lie when they are told to.

These tests run on a real loop: engines compute on threads of their own.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor

from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.session.session import RemoteSession
from shoal.client.session.state import SessionFacts
from shoal.client.settings.client_config import ClientConfig
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.peer.local_swarm.loopback import CLIENT_HOST, LoopbackPeer, LoopbackSwarm
from shoal.protocol.ids import SessionId, make_model_id
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.net.transport import FrameGate, Stream
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

HIDDEN = 64
WHOLE = Span(0, 4)
REPLICAS = ((0, 2), (0, 2), (2, 4), (2, 4))
BROKEN = Link(loss_fraction=1.0)
"""Every frame is lost for good: whatever is sent breaks its stream at once."""

Lie = Callable[[Message], Message | bytes]


@dataclass(frozen=True)
class Turn:
    """One step as a client asks it."""

    hidden_BTH: Tensor
    row_map: tuple[int, ...] | None = None

    @property
    def is_decoded(self) -> bool:
        return self.hidden_BTH.shape[1] == 1


@dataclass
class Liar:
    """Stands between the peers of a swarm and their client; whoever is first lies, once."""

    kind: type[Message] | None = None
    lie: Lie = field(default=lambda message: message)
    host: str | None = None

    def lie_once(self, kind: type[Message], lie: Lie) -> None:
        """Replace the next message of a kind, whichever peer sends it."""
        self.kind, self.lie = kind, lie

    def install(self, peer: LoopbackPeer) -> None:
        honest = peer.network.serve_stream

        async def serve(stream: Stream) -> None:
            await honest(_LyingStream(stream, self, peer.host))

        peer.network.serve_stream = serve

    def distort(self, frame: bytes, host: str) -> bytes:
        message = decode_frame(frame)
        if self.kind is None or not isinstance(message, self.kind):
            return frame
        self.kind, self.host = None, host
        lie = self.lie(message)
        return lie if isinstance(lie, bytes) else encode_frame(lie)


class _LyingStream:
    """A peer's end of a stream whose frames a liar may replace."""

    def __init__(self, stream: Stream, liar: Liar, host: str) -> None:
        self.remote_host = stream.remote_host
        self._stream = stream
        self._liar = liar
        self._host = host

    def set_gate(self, gate: FrameGate) -> None:
        self._stream.set_gate(gate)

    async def send(self, frame: bytes) -> None:
        await self._stream.send(self._liar.distort(frame, self._host))

    async def receive(self) -> bytes | None:
        return await self._stream.receive()

    async def wait_over(self) -> None:
        await self._stream.wait_over()

    async def close(self) -> None:
        await self._stream.close()


class World:
    """A swarm whose client is the test itself."""

    def __init__(
        self,
        loopback: LoopbackSwarm,
        client: AsyncClient,
        whole_engine: Engine,
    ) -> None:
        self.loopback = loopback
        self.network = loopback.network
        self.client = client
        self.swarm = client.swarm
        self.whole_engine = whole_engine
        self.liar = Liar()
        self._sessions: list[RemoteSession] = []
        for peer in loopback.peers:
            self.liar.install(peer)

    def make_turns(
        self, num_rows: int = 1, num_decoded: int = 4, prompt_tokens: int = 5
    ) -> list[Turn]:
        """Return a prompt and some single tokens, the same ones at every call."""
        generator = torch.Generator().manual_seed(20240229)
        lengths = [prompt_tokens] + [1] * num_decoded
        return [Turn(torch.randn(num_rows, num, HIDDEN, generator=generator)) for num in lengths]

    def expect(self, turns: Sequence[Turn], max_tokens: int = 128) -> list[Tensor]:
        """Compute turns in one engine, undisturbed."""
        cache = self.whole_engine.pool.open(turns[0].hidden_BTH.shape[0], max_tokens, WHOLE)
        outputs: list[Tensor] = []
        for turn in turns:
            work = StepWork(
                cache,
                cache.length,
                turn.hidden_BTH,
                turn.row_map,
                decoded=turn.is_decoded,
            )
            (output,) = self.whole_engine.execute([work])
            assert isinstance(output, Tensor), output
            outputs.append(output)
        cache.close()
        return outputs

    async def take(self, session: RemoteSession, turn: Turn) -> Tensor:
        return await session.step(turn.hidden_BTH, turn.row_map, turn.is_decoded)

    async def take_all(self, session: RemoteSession, turns: Sequence[Turn]) -> list[Tensor]:
        return [await self.take(session, turn) for turn in turns]

    def open(self, max_tokens: int = 128) -> RemoteSession:
        number = len(self._sessions).to_bytes(2, "big")
        view = self.swarm.book.view
        facts = SessionFacts(
            view.model_id, WHOLE, HIDDEN, max_tokens, session=SessionId(number + bytes(14))
        )
        session = self.client.open_session_as(facts)
        self._sessions.append(session)
        return session

    def hosts_of(self, session: RemoteSession) -> list[str]:
        return [self.loopback.find(hop.peer.peer_id).host for hop in session.hops]

    def peer_on(self, host: str) -> LoopbackPeer:
        return next(peer for peer in self.loopback.peers if peer.host == host)

    @property
    def quarantined_hosts(self) -> set[str]:
        quarantined = filter(self.swarm.book.is_quarantined, self.swarm.book.view.peers)
        return {self.loopback.find(peer.peer_id).host for peer in quarantined}

    def break_links(self, *hosts: str) -> None:
        """Let nobody reach some hosts any more."""
        self._set_links(hosts, BROKEN)

    def _set_links(self, hosts: Sequence[str], link: Link) -> None:
        for host in hosts:
            for source in (CLIENT_HOST, *(peer.host for peer in self.loopback.peers)):
                self.network.set_link(source, host, link)

    async def mend_links(self, *hosts: str) -> None:
        """Let peers be reached again, and say so themselves."""
        self._set_links(hosts, Link())
        for host in hosts:
            await self.peer_on(host).peer.announcer.announce(PeerState.ONLINE)

    async def close_sessions(self) -> None:
        """Close every session; then no peer may hold anything of them."""
        for session in self._sessions:
            await session.close()
        for peer in self.loopback.peers:
            service = look_into(peer)
            assert await service.wait_until_empty(30), f"{peer.host} still holds a session"
            # Closing a cache is posted to the thread, and calls keep their order.
            pool = service.engine.pool
            await service.compute.call(bool)  # behind what is to be closed
            assert (pool.used_bytes, pool.num_sessions) == (0, 0), peer.host
            await service.compute.call(service.engine.pool.check_integrity)


@pytest.fixture(scope="session")
def whole_engine(tiny_models: Any) -> Engine:
    """One engine with all blocks of the plain tiny Llama: what a swarm of it must equal."""
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    return load_engine(checkpoint, WHOLE, WeightFormat.FP32, kv_budget_bytes=2**24)


RunStory = Callable[..., None]


@pytest.fixture(params=[pytest.param("star", marks=pytest.mark.thorough), "chain"])
def delivery(request: pytest.FixtureRequest) -> str:
    """How hidden states get from hop to hop: every story comes out the same.

    To a session, a star is a chain whose segments have one hop each.
    """
    return request.param


@pytest.fixture
def run_story(tiny_models: Any, whole_engine: Engine, delivery: str) -> RunStory:
    """Runs a story in a world of its own; when it is over, nothing may be left of it."""
    directory: Path = tiny_models.get().directory

    def run(
        story: Callable[[World], Awaitable[None]],
        spans: Sequence[tuple[int, int]] = REPLICAS,
        kv_budget_bytes: int = 2**22,
        **settings: Any,
    ) -> None:
        problems: list[dict[str, Any]] = []
        config = ClientConfig(**{"seed": 0, "delivery": delivery, **settings})

        async def main() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: problems.append(context))
            loopback = LoopbackSwarm(directory, spans, kv_budget_bytes=kv_budget_bytes)
            checkpoint = Checkpoint.open(directory)
            model_id = make_model_id(checkpoint.config, checkpoint.revision)
            model = SwarmModel(model_id, WHOLE.stop, HIDDEN)
            network = loopback.connect(config)
            async with await AsyncClient.join(config, network, SystemClock(), model) as client:
                world = World(loopback, client, whole_engine)
                async with asyncio.timeout(60):  # a hang is a failure, not a wait
                    await story(world)
                    await world.close_sessions()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(main())
        gc.collect()
        assert problems == []
        assert not [thread for thread in threading.enumerate() if thread.name == "compute"]

    return run
