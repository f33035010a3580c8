"""A session over a swarm of scripted peers whose arithmetic shows every wrong cache.

A peer's block adds up the whole prefix of its row, so that a token too few, too many, moved or
out of place changes all answers behind it. The numbers are small integers: equal means equal.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from async_tests import make_decorator
from scripted_swarm import MODEL_ID, ScriptedSwarm
from torch import Tensor
from virtual_time import VirtualClock

from shoal.client.routing.route_finder import SwarmModel
from shoal.client.runtime.async_client import AsyncClient
from shoal.client.session.hop_link import from_wire, to_wire
from shoal.client.session.session import RemoteSession
from shoal.client.session.state import SessionFacts
from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.errors import ErrorCode
from shoal.protocol.identity import Identity
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import (
    Close,
    Declined,
    Gap,
    Hello,
    Open,
    Opened,
    Output,
    Step,
    Welcome,
)
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span

NUM_BLOCKS = 6
WIDTH = 4
SECRET = SessionId(b"the secret of it")
CONFIG = ClientConfig(seed=1)
MODULUS = 127  # exact in every wire dtype


def run_block(cache_BSH: Tensor, block: int) -> Tensor:
    """Return a block's output for every token of a prefix."""
    return torch.remainder(cache_BSH.double().cumsum(1) * 3 + block + 1, MODULUS).float()


def run_span(cache_BSH: Tensor, span: Span) -> Tensor:
    for block in range(span.start, span.stop):
        cache_BSH = run_block(cache_BSH, block)
    return cache_BSH


@dataclass
class ScriptedCache:
    """What a peer holds for one session: the input of every token of the prefix."""

    opening: Open
    tokens_BSH: Tensor

    def apply(self, step: Step) -> Tensor:
        prefix_BSH = self.tokens_BSH[:, : step.position]
        if step.row_map is not None:
            prefix_BSH = prefix_BSH[list(step.row_map)]
        self.tokens_BSH = torch.cat([prefix_BSH, from_wire(step.hidden).float()], dim=1)
        output_BTH = run_span(self.tokens_BSH, self.opening.span)[:, step.position :]
        return output_BTH[:, -1:] if step.last_token_only else output_BTH


Answer = Message | bytes | None
Mischief = Callable[[Message, Answer], Answer]


def be_honest(_: Message, answer: Answer) -> Answer:
    return answer


@dataclass
class FakePeer:
    """Serves a span; `mischief` may change any answer, None hangs up.

    Behind each output, it sends `num_repeats` of it.
    """

    name: str
    identity: Identity
    span: Span
    mischief: Mischief = be_honest
    num_repeats: int = 0
    caches: dict[SessionId, ScriptedCache] = field(default_factory=dict)
    opens: list[Open] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        mine: set[SessionId] = set()
        try:
            while (frame := await stream.receive()) is not None:
                message = decode_frame(frame)
                answer = self.mischief(message, self._answer(message, mine))
                if isinstance(message, Close):
                    continue
                if answer is None:
                    return
                await stream.send(answer if isinstance(answer, bytes) else encode_frame(answer))
                if isinstance(answer, Output):
                    for _ in range(self.num_repeats):
                        await stream.send(encode_frame(answer))
        finally:
            for session in mine:
                self.caches.pop(session, None)

    def _answer(self, message: Message, mine: set[SessionId]) -> Answer:
        if isinstance(message, Hello):
            return Welcome(1, "fake", self.identity.peer_id, MODEL_ID, self.span, 0.0)
        if isinstance(message, Open):
            assert message.session not in self.caches
            if not self.span.covers(message.span):
                return Declined(message.session, 0, ErrorCode.WRONG_SPAN, f"only {self.span}")
            self.opens.append(message)
            mine.add(message.session)
            prefix_BSH = torch.zeros(message.num_rows, 0, WIDTH)
            if message.parent is not None:
                parent = self.caches.get(message.parent)
                if parent is None:
                    return Declined(message.session, 0, ErrorCode.UNKNOWN_SESSION, "no parent")
                assert parent.opening.span == message.span
                assert message.prefix_tokens <= parent.tokens_BSH.shape[1]
                prefix_BSH = parent.tokens_BSH[:, : message.prefix_tokens]
            self.caches[message.session] = ScriptedCache(message, prefix_BSH)
            return Opened(message.session, message.epoch, 0.0, 1000)
        if isinstance(message, Step):
            return self._step(message)
        if isinstance(message, Close):
            self.caches.pop(message.session, None)
        return None

    def _step(self, step: Step) -> Answer:
        self.steps.append(step)
        cache = self.caches.get(step.session)
        if cache is None:
            return Declined(step.session, step.sequence, ErrorCode.UNKNOWN_SESSION, "gone")
        length = cache.tokens_BSH.shape[1]
        if step.position > length:
            return Gap(step.session, step.epoch, step.sequence, length)
        output = to_wire(cache.apply(step), cache.opening.dtype)
        return Output(step.session, step.epoch, step.sequence, step.position, output)


class SessionScene(ScriptedSwarm):
    """Fake peers, and a client's view of them."""

    def __init__(self, link: Link | None = None, config: ClientConfig = CONFIG) -> None:
        super().__init__(NUM_BLOCKS, link)
        self.peers: dict[str, FakePeer] = {}
        self.config = config
        self.client = self.make_transport("client")
        model = SwarmModel(MODEL_ID, NUM_BLOCKS, WIDTH)
        self.member = AsyncClient(config, model, self.client, self.directory, self.clock)
        self.swarm = self.member.swarm
        self.sessions: list[RemoteSession] = []

    async def add(self, name: str, start: int, stop: int, **announced: Any) -> FakePeer:
        peer = FakePeer(name, Identity(bytes([len(self.peers)]) * 32), Span(start, stop))
        self.peers[name] = peer
        endpoint = await self.listen(name, peer.serve)
        await self.announce_peer(peer, endpoints=(endpoint,), **announced)
        return peer

    async def announce_peer(self, peer: Any, **announced: Any) -> None:
        speeds = {"decode_steps_per_second": 100.0, "prefill_tokens_per_second": 1000.0}
        facts = {"weights": "fp32"} | speeds | announced
        await self.announce(peer.identity, peer.span, **facts)

    def open_session(self, max_tokens: int = 100, secret: SessionId = SECRET) -> RemoteSession:
        facts = SessionFacts(MODEL_ID, Span(0, NUM_BLOCKS), WIDTH, max_tokens, session=secret)
        session = self.member.open_session_as(facts)
        self.sessions.append(session)
        return session

    def peer_of(self, session: RemoteSession, hop: int) -> FakePeer:
        peer_id = session.hops[hop].peer.peer_id
        return next(p for p in self.peers.values() if p.identity.peer_id == peer_id)

    def names_of(self, session: RemoteSession) -> list[str]:
        return [self.peer_of(session, hop).name for hop in range(len(session.hops))]

    @property
    def quarantined(self) -> list[str]:
        found = {
            peer.peer_id
            for peer in self.swarm.book.view.peers
            if self.swarm.book.is_quarantined(peer)
        }
        return [name for name, peer in self.peers.items() if peer.identity.peer_id in found]


async def run(
    test: Callable[[SessionScene], Awaitable[None]],
    link: Link | None = None,
    config: ClientConfig = CONFIG,
) -> None:
    """Run a test; once its sessions are closed nothing is left at any peer that can be reached."""
    problems: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    await _play(test, SessionScene(link, config))
    gc.collect()  # a task that the scene held reports an error that nobody read
    assert problems == []


async def _play(test: Callable[[SessionScene], Awaitable[None]], scene: SessionScene) -> None:
    await test(scene)
    for session in scene.sessions:
        await session.close()
    for name in scene.peers:
        scene.network.resume(name)
    await asyncio.sleep(60)
    assert {name: peer.caches for name, peer in scene.peers.items() if peer.caches} == {}
    assert repr(scene.network).startswith("LoopbackNetwork(streams=0,"), scene.network
    await scene.member.close()
    await scene.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


in_scene = make_decorator(run)


def draw(seed: int, num_tokens: int = 1, num_rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_tokens, WIDTH)
    return torch.randint(0, MODULUS, shape, generator=generator).float()


class Oracle:
    """One machine with all blocks and the same surface as a session."""

    def __init__(self) -> None:
        self._cache_BSH: Tensor | None = None
        self.position = 0

    def step(self, hidden_BTH: Tensor, row_map: tuple[int, ...] | None = None) -> Tensor:
        if self._cache_BSH is None:
            self._cache_BSH = hidden_BTH[:, :0]
        prefix_BSH = self._cache_BSH[:, : self.position]
        if row_map is not None:
            prefix_BSH = prefix_BSH[list(row_map)]
        self._cache_BSH = torch.cat([prefix_BSH, hidden_BTH], dim=1)
        start, self.position = self.position, self._cache_BSH.shape[1]
        return run_span(self._cache_BSH, Span(0, NUM_BLOCKS))[:, start:]


async def add_two_rows_of_peers(scene: SessionScene) -> None:
    for name, start, stop in (("a", 0, 2), ("b", 2, 4), ("c", 4, 6)):
        await scene.add(f"{name}1", start, stop)
        await scene.add(f"{name}2", start, stop)


def now() -> float:
    return VirtualClock().now()


def decline_when(
    is_meant: Callable[[Message], bool], code: ErrorCode, retry_after: float | None
) -> Mischief:
    def mischief(message: Message, answer: Answer) -> Answer:
        if isinstance(message, Open | Step) and is_meant(message):
            sequence = message.sequence if isinstance(message, Step) else 0
            return Declined(message.session, sequence, code, "not now", retry_after)
        return answer

    return mischief
