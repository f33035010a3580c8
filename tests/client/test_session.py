"""A session over a swarm of scripted peers whose arithmetic shows every wrong cache.

A peer's block adds up the whole prefix of its row, so that a token too few, too many, moved or
out of place changes all answers behind it. The numbers are small integers: equal means equal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal.client.config import ClientConfig
from shoal.client.live_hops import LiveHops, SessionFacts
from shoal.client.session import RemoteSession
from shoal.client.swarm import Swarm
from shoal.client.tensors import from_wire, to_wire
from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    RefusedError,
    RouteError,
    UnavailableError,
    UsageError,
)
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId, SessionId
from shoal.protocol.messages import (
    Close,
    Declined,
    Gap,
    Hello,
    Message,
    Open,
    Opened,
    Output,
    Step,
    Welcome,
)
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span
from shoal.protocol.wire import decode_frame, encode_frame

MODEL_ID = ModelId("a" * 32)
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
class FakeCache:
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
    """Serves a span; `mischief` may change any answer, None hangs up."""

    name: str
    identity: Identity
    span: Span
    mischief: Mischief = be_honest
    caches: dict[SessionId, FakeCache] = field(default_factory=dict)
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
        finally:
            for session in mine:
                self.caches.pop(session, None)

    def _answer(self, message: Message, mine: set[SessionId]) -> Answer:
        if isinstance(message, Hello):
            return Welcome(1, "fake", self.identity.peer_id, MODEL_ID, self.span, 0.0)
        if isinstance(message, Open):
            assert message.session not in self.caches
            assert self.span.covers(message.span)
            self.opens.append(message)
            mine.add(message.session)
            empty = torch.zeros(message.num_rows, 0, WIDTH)
            self.caches[message.session] = FakeCache(message, empty)
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


class Scene:
    """A network, a directory, fake peers and a client's view of them."""

    def __init__(self, link: Link | None = None, config: ClientConfig = CONFIG) -> None:
        self.network = LoopbackNetwork(link=link)
        self.store = MemoryDirectoryStore()
        self.peers: dict[str, FakePeer] = {}
        self.config = config
        self.client = LoopbackTransport(self.network, "client")
        self.transports: list[LoopbackTransport] = [self.client]
        self.swarm = self.make_swarm()
        self.sessions: list[RemoteSession] = []

    def make_swarm(self) -> Swarm:
        directory = MemoryDirectory(self.store, VirtualClock())
        return Swarm(directory, MODEL_ID, NUM_BLOCKS, VirtualClock(), random.Random(1))

    async def add(self, name: str, start: int, stop: int, **announced: Any) -> FakePeer:
        number = len(self.peers)
        transport = LoopbackTransport(self.network, name)
        self.transports.append(transport)
        peer = FakePeer(name, Identity(bytes([number]) * 32), Span(start, stop))
        self.peers[name] = peer
        listener = await transport.listen(name, 0, peer.serve)
        await self.announce(peer, endpoints=(listener.endpoint,), **announced)
        return peer

    async def announce(self, peer: FakePeer, **announced: Any) -> None:
        now = VirtualClock().wall()
        fields: dict[str, Any] = {
            "peer_id": peer.identity.peer_id,
            "model_id": MODEL_ID,
            "num_blocks": NUM_BLOCKS,
            "span": peer.span,
            "state": PeerState.ONLINE,
            "endpoints": (),
            "min_version": 1,
            "max_version": 1,
            "weights": "fp32",
            "compute_dtype": "fp32",
            "sequence": int(now * 1000),
            "issued_at": now,
            "expires_at": now + 600,
            "decode_steps_per_second": 100.0,
            "prefill_tokens_per_second": 1000.0,
        }
        record = sign_announcement(peer.identity, Announcement(**(fields | announced)))
        await MemoryDirectory(self.store, VirtualClock()).announce(record)

    def open_session(self, max_tokens: int = 100, secret: SessionId = SECRET) -> RemoteSession:
        facts = SessionFacts(secret, MODEL_ID, Span(0, NUM_BLOCKS), WIDTH, max_tokens)
        session = RemoteSession(
            LiveHops(facts, self.swarm, self.client, VirtualClock(), self.config)
        )
        self.sessions.append(session)
        return session

    def peer_of(self, session: RemoteSession, hop: int) -> FakePeer:
        peer_id = session.hops[hop].peer.peer_id
        return next(p for p in self.peers.values() if p.identity.peer_id == peer_id)

    def names_of(self, session: RemoteSession) -> list[str]:
        return [self.peer_of(session, hop).name for hop in range(len(session.hops))]

    @property
    def quarantined(self) -> list[str]:
        found = {peer.peer_id for peer in self.swarm.view.peers if self.swarm.is_quarantined(peer)}
        return [name for name, peer in self.peers.items() if peer.identity.peer_id in found]


def run(
    test: Callable[[Scene], Awaitable[None]],
    link: Link | None = None,
    config: ClientConfig = CONFIG,
) -> None:
    """Run a test; once its sessions are closed nothing is left at any peer that can be reached."""
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        scene = Scene(link, config)
        await test(scene)
        for session in scene.sessions:
            await session.close()
        for name in scene.peers:
            scene.network.resume(name)
        await asyncio.sleep(60)
        assert {name: peer.caches for name, peer in scene.peers.items() if peer.caches} == {}
        assert repr(scene.network).startswith("LoopbackNetwork(streams=0,"), scene.network
        for transport in scene.transports:
            scene.network.revive(transport._host)
            await transport.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
    assert problems == []


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


async def add_two_rows_of_peers(scene: Scene) -> None:
    for name, start, stop in (("a", 0, 2), ("b", 2, 4), ("c", 4, 6)):
        await scene.add(f"{name}1", start, stop)
        await scene.add(f"{name}2", start, stop)


def now() -> float:
    return VirtualClock().now()


def test_steps_rollbacks_and_row_maps_equal_one_machine() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()

        for index, row_map in enumerate([None, None, (1, 1), None, (0, 0), None]):
            hidden = draw(index, 1 + 3 * (index == 0), num_rows=2)
            assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
        session.rollback(3)
        oracle.position = 3
        hidden = draw(9, 2, num_rows=2)
        output = await session.step(hidden, last_token_only=True)

        assert torch.equal(output, oracle.step(hidden)[:, -1:])
        assert session.position == 5
        assert session.failovers == []
        assert [str(hop.span) for hop in session.hops] == ["0:2", "2:4", "4:6"]

    run(test)


def test_long_prompts_travel_in_pieces() -> None:
    async def test(scene: Scene) -> None:
        peer = await scene.add("a", 0, NUM_BLOCKS)
        session, oracle = scene.open_session(), Oracle()
        prompt = draw(1, 50)

        assert torch.equal(await session.step(prompt), oracle.step(prompt))
        assert [step.hidden.tokens for step in peer.steps] == [16, 16, 16, 2]
        last = await session.step(prompt, last_token_only=True)
        assert torch.equal(last, oracle.step(prompt)[:, -1:])

    run(test, config=replace(CONFIG, max_step_bytes=16 * WIDTH * 4))


def test_hops_compute_pieces_of_one_prompt_at_the_same_time() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        await session.step(draw(0))
        oracle.step(draw(0))
        started_at = now()

        assert torch.equal(await session.step(draw(1, 40)), oracle.step(draw(1, 40)))

        # Ten pieces over three hops with a round trip of 0.1 s each: 12 of them, not 30.
        assert now() - started_at == pytest.approx(1.2, abs=0.05)

    config = replace(CONFIG, max_step_bytes=4 * WIDTH * 4)
    run(test, Link(delay_seconds=0.05), config)


@pytest.mark.parametrize("seed", range(8))
def test_hops_lost_while_pieces_are_under_way_are_replaced(seed: int) -> None:
    """Kills, pauses and partitions of hops at any moment of a prompt, one or several."""
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(400), Oracle()
        for number in range(4):
            row_map = (1, 0) if number else None
            task = asyncio.create_task(session.step(draw(number, 30, 2), row_map))
            for _ in range(rng.randint(1, 3)):
                await asyncio.sleep(rng.random() * 0.5)
                if not session.hops:
                    continue
                victim = scene.peer_of(session, rng.randrange(len(session.hops)))
                getattr(scene.network, rng.choice(("kill", "pause")))(victim.name)
                name = f"{victim.name}-{len(scene.peers)}"
                await scene.add(name, victim.span.start, victim.span.stop)
            assert torch.equal(await task, oracle.step(draw(number, 30, 2), row_map))
        assert torch.equal(await session.step(draw(9, 1, 2)), oracle.step(draw(9, 1, 2)))
        assert session.failovers

    config = replace(CONFIG, max_step_bytes=2 * 4 * WIDTH * 4)
    run(test, Link(delay_seconds=0.02), config)


@pytest.mark.parametrize(
    ("weights", "configured", "expected"),
    [
        (["fp32", "fp32"], "auto", torch.float32),
        (["fp32", "int8"], "auto", torch.bfloat16),
        (["fp32", "fp32"], "fp16", torch.float16),
    ],
)
def test_wire_dtype_follows_the_peers_unless_it_is_set(
    weights: list[str], configured: str, expected: torch.dtype
) -> None:
    async def test(scene: Scene) -> None:
        first = await scene.add("a", 0, 3, weights=weights[0])
        await scene.add("b", 3, 6, weights=weights[1])
        session = scene.open_session()

        output = await session.step(draw(1, 3))

        assert output.dtype == expected
        assert from_wire(first.steps[0].hidden).dtype == expected
        assert torch.equal(output.float(), Oracle().step(draw(1, 3)))

    run(test, config=replace(CONFIG, wire_dtype=configured))


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("trouble", ["kill", "pause", "partition"])
def test_hop_in_trouble_is_replaced_and_the_others_keep_their_caches(
    trouble: str, hop: int
) -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        for index in range(4):
            hidden = draw(index, 1 + 5 * (index == 0))
            assert torch.equal(await session.step(hidden), oracle.step(hidden))
        lost, before = scene.peer_of(session, hop), scene.names_of(session)
        others = [scene.peer_of(session, index) for index in range(3) if index != hop]
        counts = [len(peer.steps) for peer in others]

        if trouble == "partition":
            scene.network.partition("client", lost.name)
        else:
            getattr(scene.network, trouble)(lost.name)
        for index in range(4, 8):
            hidden = draw(index)
            assert torch.equal(await session.step(hidden), oracle.step(hidden))

        (failover,) = session.failovers
        assert failover.lost.peer.peer_id == lost.identity.peer_id
        assert (failover.position, failover.num_replayed_tokens) == (9, 9)
        assert [old == new for old, new in zip(before, scene.names_of(session), strict=True)] == [
            index != hop for index in range(3)
        ]
        assert [len(peer.steps) - n for peer, n in zip(others, counts, strict=True)] == [4, 4]
        assert scene.quarantined == [lost.name]
        if trouble == "partition":
            scene.network.heal("client", lost.name)

    run(test)


def test_all_hops_may_be_lost_at_once() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        hidden = draw(1, 7)
        assert torch.equal(await session.step(hidden), oracle.step(hidden))

        for name in scene.names_of(session):
            scene.network.kill(name)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        assert len(session.failovers) == 3

    run(test)


def test_one_hop_may_be_replaced_by_several() -> None:
    async def test(scene: Scene) -> None:
        whole = await scene.add("whole", 0, 6, decode_steps_per_second=1e6)
        session, oracle = scene.open_session(), Oracle()
        steps = [draw(1, 5, 2), draw(2, 1, 2), draw(3, 1, 2)]
        for hidden, row_map in zip(steps, (None, (1, 0), (1, 1)), strict=True):
            assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
        for index in range(6):
            await scene.add(f"part{index}", index, index + 1)
        scene.network.kill(whole.name)
        await scene.swarm.refresh()

        hidden = draw(4, 1, 2)
        assert torch.equal(await session.step(hidden), oracle.step(hidden))
        assert len(session.hops) == 6
        scene.network.kill("part3")
        await scene.add("other3", 3, 4)
        assert torch.equal(await session.step(hidden), oracle.step(hidden))

    run(test)


def test_one_peer_may_serve_two_hops_of_a_route() -> None:
    async def test(scene: Scene) -> None:
        # Slow with all blocks, so that the fast one is used where it can be.
        slow = await scene.add("slow", 0, 6, decode_steps_per_second=0.5)
        await scene.add("fast", 2, 4, decode_steps_per_second=1e5)
        session, oracle = scene.open_session(), Oracle()

        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        assert scene.names_of(session) == ["slow", "fast", "slow"]
        scene.network.kill("fast")
        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

        assert scene.names_of(session) == ["slow", "slow", "slow"]
        assert len({opening.session for opening in slow.opens}) == 3

    run(test)


def test_random_life_of_a_session_equals_one_machine() -> None:
    """Steps, rollbacks, row maps, kills, pauses and newcomers, in any order."""
    for seed in range(12):
        print(f"seed {seed}")
        rng = random.Random(seed)

        async def test(scene: Scene, rng: random.Random = rng) -> None:
            await add_two_rows_of_peers(scene)
            session, oracle = scene.open_session(200), Oracle()
            num_rows = rng.choice((1, 3))
            for index in range(40):
                if rng.random() < 0.15:
                    position = rng.randint(0, session.position)
                    session.rollback(position)
                    oracle.position = position
                if session.hops and rng.random() < 0.2:
                    victim = scene.peer_of(session, rng.randrange(len(session.hops)))
                    getattr(scene.network, rng.choice(("kill", "pause")))(victim.name)
                    span = victim.span
                    await scene.add(f"{victim.name}-{index}", span.start, span.stop)
                hidden = draw(rng.randrange(1000), rng.choice((1, 1, 1, 4)), num_rows)
                row_map = None
                if rng.random() < 0.3:
                    row_map = tuple(rng.randrange(num_rows) for _ in range(num_rows))
                output = await session.step(hidden, row_map)
                assert torch.equal(output, oracle.step(hidden, row_map)), (rng, index)

        run(test, config=replace(CONFIG, max_step_bytes=3 * WIDTH * 4 * 3))


# Mischief at the third step that a peer is asked.


def at_third_step(change: Callable[[Step, Any], Answer]) -> Iterator[Mischief]:
    count = 0

    def mischief(message: Message, answer: Answer) -> Answer:
        nonlocal count
        if not isinstance(message, Step):
            return answer
        count += 1
        return change(message, answer) if count == 3 else answer

    yield mischief


def spoil(value: float) -> Callable[[Step, Any], Answer]:
    def change(_: Step, answer: Any) -> Answer:
        hidden_BTH = from_wire(answer.hidden).clone()
        hidden_BTH[0, 0, 0] = value
        return replace(answer, hidden=to_wire(hidden_BTH, answer.hidden.dtype))

    return change


def resize(*shape: int) -> Callable[[Step, Any], Answer]:
    return lambda _, answer: replace(answer, hidden=to_wire(torch.ones(shape), answer.hidden.dtype))


MISCHIEF: dict[str, Callable[[Step, Any], Answer]] = {
    "more tokens": resize(1, 2, WIDTH),
    "more rows": resize(2, 1, WIDTH),
    "wider": resize(1, 1, WIDTH + 1),
    "nan": spoil(float("nan")),
    "infinity": spoil(float("inf")),
    "other session": lambda _, answer: replace(answer, session=SessionId(b"x" * 16)),
    "other sequence": lambda _, answer: replace(answer, sequence=answer.sequence + 1),
    "other dtype": lambda _, answer: replace(
        answer, hidden=to_wire(from_wire(answer.hidden), type(answer.hidden.dtype).BF16)
    ),
    "garbage": lambda _, answer: b"\xff" * 100,
    "cut": lambda _, answer: encode_frame(answer)[:-3],
    "welcome": lambda _, answer: Opened(answer.session, 1, 0.0, 0),
    "gap": lambda step, _: Gap(step.session, step.epoch, step.sequence, 0),
    "internal": lambda step, _: Declined(step.session, step.sequence, ErrorCode.INTERNAL, "oh"),
    "hangs up": lambda step, _: None,
}


@pytest.mark.parametrize("name", MISCHIEF)
def test_peer_that_misbehaves_is_replaced_and_avoided(name: str) -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        for index in range(2):
            assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))
        villain = scene.peer_of(session, 1)
        villain.mischief = next(at_third_step(MISCHIEF[name]))
        for index in range(2, 9):
            assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))

        (failover,) = session.failovers
        assert failover.lost.peer.peer_id == villain.identity.peer_id
        assert scene.quarantined == [villain.name]
        assert villain.name not in scene.names_of(session)

    run(test)


def test_peer_that_misbehaves_during_a_replay_is_replaced_as_well() -> None:
    async def test(scene: Scene) -> None:
        for name in ("b1", "b2", "b3"):
            await scene.add(name, 0, 6)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(0, 3)), oracle.step(draw(0, 3)))
        first = scene.peer_of(session, 0)
        others = [peer for peer in scene.peers.values() if peer is not first]
        spoilt: list[str] = []

        def make_mischief(peer: FakePeer) -> Mischief:
            def mischief(message: Message, answer: Answer) -> Answer:
                if isinstance(message, Step) and not spoilt:
                    spoilt.append(peer.name)
                    return spoil(float("nan"))(message, answer)
                return answer

            return mischief

        for peer in others:
            peer.mischief = make_mischief(peer)
        scene.network.kill(first.name)

        assert torch.equal(await session.step(draw(1)), oracle.step(draw(1)))
        assert sorted(scene.quarantined) == sorted([first.name, *spoilt])

    run(test)


@pytest.mark.parametrize(
    ("hidden", "row_map"),
    [
        (torch.full((1, 1, WIDTH), float("nan")), None),
        (torch.full((1, 1, WIDTH), float("inf")), None),
        (torch.zeros(1, 1, WIDTH + 1), None),
        (torch.zeros(1, WIDTH), None),
        (torch.zeros(2, 1, WIDTH), None),
        (torch.zeros(1, 0, WIDTH), None),
        (torch.zeros(0, 1, WIDTH), None),
        (torch.zeros(1, 98, WIDTH), None),
        (torch.zeros(1, 1, WIDTH, dtype=torch.int64), None),
        (torch.zeros(1, 1, WIDTH), (1,)),
        (torch.zeros(1, 1, WIDTH), (-1,)),
        (torch.zeros(1, 1, WIDTH), (0, 0)),
    ],
    ids=[
        "nan",
        "infinity",
        "width",
        "two dimensions",
        "rows",
        "no tokens",
        "no rows",
        "too long",
        "integers",
        "row beyond",
        "row below",
        "rows too many",
    ],
)
def test_callers_mistake_is_a_usage_error_and_nobody_else_is_blamed(
    hidden: Tensor, row_map: tuple[int, ...] | None
) -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))

        with pytest.raises(UsageError):
            await session.step(hidden, row_map)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        assert (session.failovers, scene.quarantined) == ([], [])

    run(test)


def test_too_many_rows_are_a_usage_error() -> None:
    async def test(scene: Scene) -> None:
        with pytest.raises(UsageError, match="256 rows"):
            await scene.open_session().step(torch.zeros(257, 1, WIDTH))

    run(test)


def test_position_beyond_the_session_is_a_usage_error() -> None:
    async def test(scene: Scene) -> None:
        await scene.add("a", 0, 6)
        session = scene.open_session()
        await session.step(draw(1, 3))
        for position in (-1, 4):
            with pytest.raises(UsageError):
                session.rollback(position)
        assert session.position == 3

    run(test)


@pytest.mark.parametrize("code", [ErrorCode.BAD_VALUES, ErrorCode.TOO_LONG, ErrorCode.BAD_FRAME])
@pytest.mark.parametrize("kind", [Open, Step])
def test_refusal_of_the_question_goes_to_the_caller_and_nobody_is_blamed(
    kind: type[Open] | type[Step], code: ErrorCode
) -> None:
    def decline(message: Message, answer: Answer) -> Answer:
        if isinstance(message, kind):
            sequence = message.sequence if isinstance(message, Step) else 0
            return Declined(message.session, sequence, code, "your fault")
        return answer

    async def test(scene: Scene) -> None:
        for name in ("a", "b"):
            (await scene.add(name, 0, 6)).mischief = decline
        session = scene.open_session()

        with pytest.raises(RefusedError, match="your fault") as caught:
            await session.step(draw(1, 3))

        assert caught.value.code is code
        assert scene.quarantined == []
        for peer in scene.peers.values():
            peer.mischief = be_honest
        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

    run(test)


@pytest.mark.parametrize("code", [ErrorCode.BAD_VALUES, ErrorCode.TOO_LONG, ErrorCode.BAD_FRAME])
@pytest.mark.parametrize("kind", [Open, Step])
def test_one_peer_that_blames_the_question_is_not_believed(
    kind: type[Message], code: ErrorCode
) -> None:
    async def test(scene: Scene) -> None:
        liar = await scene.add("liar", 0, 6, decode_steps_per_second=1e6)
        await scene.add("honest", 0, 6)
        session, oracle = scene.open_session(), Oracle()
        if kind is Step:
            assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
            assert scene.names_of(session) == ["liar"]
        liar.mischief = decline_when(lambda message: isinstance(message, kind), code, None)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

        assert scene.names_of(session) == ["honest"]
        assert scene.quarantined == (["liar"] if kind is Step else [])
        assert now() < 1

    run(test)


@pytest.mark.parametrize("first_position", [0, 3], ids=["first step", "later"])
def test_peer_that_keeps_losing_sessions_is_left(first_position: int) -> None:
    """It opens and replays well, so it would be chosen again for every step."""

    async def test(scene: Scene) -> None:
        liar = await scene.add("liar", 0, 6, decode_steps_per_second=1e6)
        await scene.add("honest", 0, 6)
        session, oracle = scene.open_session(), Oracle()
        liar.mischief = decline_when(
            lambda message: isinstance(message, Step) and message.position >= first_position,
            ErrorCode.UNKNOWN_SESSION,
            None,
        )
        if first_position:
            assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
            assert scene.names_of(session) == ["liar"]

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

        assert scene.names_of(session) == ["honest"]
        assert scene.quarantined == ["liar"]
        assert now() < 1

    run(test)


def test_hops_are_dropped_together_even_if_hanging_up_is_cancelled() -> None:
    """Dropped one after the other, a hop whose rows were moved could be taken for one that was
    not asked yet.
    """

    class SlowLink:
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session = scene.open_session()
        await session.step(draw(1, 3))
        links: list[Any] = [live.link for live in session._hops]
        for live in session._hops:
            live.link = cast(Any, SlowLink())

        task = asyncio.create_task(session._restore([(live, live.log) for live in session._hops]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

        assert [live.link for live in session._hops] == [None] * 3
        for link in links:
            await link.close()

    run(test)


@pytest.mark.parametrize("kind", [Open, Step])
def test_only_peer_that_blames_the_question_is_believed_at_once(kind: type[Message]) -> None:
    async def test(scene: Scene) -> None:
        peer = await scene.add("a", 0, 6)
        peer.mischief = decline_when(
            lambda message: isinstance(message, kind), ErrorCode.BAD_VALUES, None
        )
        session = scene.open_session()

        with pytest.raises(RefusedError) as caught:
            await session.step(draw(1, 3))

        assert caught.value.code is ErrorCode.BAD_VALUES
        assert now() < 1
        peer.mischief = be_honest
        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

    run(test)


def decline_when(
    is_meant: Callable[[Message], bool], code: ErrorCode, retry_after: float | None
) -> Mischief:
    def mischief(message: Message, answer: Answer) -> Answer:
        if isinstance(message, Open | Step) and is_meant(message):
            sequence = message.sequence if isinstance(message, Step) else 0
            return Declined(message.session, sequence, code, "not now", retry_after)
        return answer

    return mischief


@pytest.mark.parametrize("code", [ErrorCode.CACHE_FULL, ErrorCode.BUSY, ErrorCode.DRAINING])
@pytest.mark.parametrize("kind", [Open, Step])
def test_peer_without_room_is_left_for_its_replica(code: ErrorCode, kind: type[Message]) -> None:
    async def test(scene: Scene) -> None:
        full = await scene.add("full", 0, 6, decode_steps_per_second=1e6)
        await scene.add("free", 0, 6)
        full.mischief = decline_when(lambda message: isinstance(message, kind), code, 2.0)
        session = scene.open_session()

        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

        assert scene.names_of(session) == ["free"]
        assert now() < 1

    run(test)


@pytest.mark.parametrize("kind", [Open, Step])
def test_no_room_anywhere_is_said_after_a_bounded_time(kind: type[Message]) -> None:
    async def test(scene: Scene) -> None:
        is_full = True
        for name in ("a", "b"):
            (await scene.add(name, 0, 6)).mischief = decline_when(
                lambda message: is_full and isinstance(message, kind), ErrorCode.CACHE_FULL, 2.0
            )
        session = scene.open_session()

        with pytest.raises(CacheFullError) as caught:
            await session.step(draw(1, 3))

        assert caught.value.retry_after_seconds == 2.0
        seconds = CONFIG.failover_timeout_seconds
        assert 0.8 * seconds <= now() <= 2.5 * seconds
        is_full = False
        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

    run(test)


def test_room_that_becomes_free_meanwhile_is_used() -> None:
    async def test(scene: Scene) -> None:
        for name in ("a", "b"):
            (await scene.add(name, 0, 6)).mischief = decline_when(
                lambda _: now() < 8, ErrorCode.CACHE_FULL, 2.0
            )

        session = scene.open_session()

        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))
        assert 8 <= now() < 12

    run(test)


def test_what_never_fits_anywhere_is_said_at_once() -> None:
    async def test(scene: Scene) -> None:
        for name in ("a", "b"):
            (await scene.add(name, 0, 6)).mischief = decline_when(
                lambda message: isinstance(message, Open), ErrorCode.CACHE_FULL, None
            )

        with pytest.raises(CacheFullError):
            await scene.open_session().step(draw(1, 3))

    run(test, config=replace(CONFIG, failover_timeout_seconds=20.0))


def test_blocks_that_nobody_serves_are_named_and_the_session_goes_on_later() -> None:
    async def test(scene: Scene) -> None:
        await scene.add("a", 0, 3)
        session = scene.open_session()

        with pytest.raises(RouteError) as caught:
            await session.step(draw(1, 3))

        assert caught.value.missing == (Span(3, 6),)
        assert now() == pytest.approx(CONFIG.failover_timeout_seconds, abs=1)
        await scene.add("b", 3, 6)
        assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))

    run(test)


def test_lost_hop_without_a_replica_is_named_and_the_session_goes_on_later() -> None:
    async def test(scene: Scene) -> None:
        for name, start, stop in (("a", 0, 2), ("b", 2, 4), ("c", 4, 6)):
            await scene.add(name, start, stop)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        scene.network.kill("b")

        for _ in range(2):
            with pytest.raises(RouteError) as caught:
                await session.step(draw(2))
            assert caught.value.missing == (Span(2, 4),)
            assert session.position == 3
        await scene.add("b2", 2, 4)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        # The first hop took the token three times over; it rolled back each time.
        assert len(scene.peers["a"].opens) == 1

    run(test)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [1, 7], ids=["token", "pieces"])
def test_step_that_moved_rows_and_failed_can_be_tried_again(num_tokens: int, hop: int) -> None:
    """A peer cannot undo a row map: applied twice it would be wrong."""

    async def test(scene: Scene) -> None:
        spans = (("a", 0, 2), ("b", 2, 4), ("c", 4, 6))
        for name, start, stop in spans:
            await scene.add(name, start, stop)
        session, oracle = scene.open_session(), Oracle()
        rows = 3
        assert torch.equal(await session.step(draw(1, 2, rows)), oracle.step(draw(1, 2, rows)))
        hidden, row_map = draw(2, num_tokens, rows), (1, 2, 0)
        assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
        name, start, stop = spans[hop]
        scene.peers[name].mischief = next(at_last_piece(scene, name))

        with pytest.raises(RouteError):
            await session.step(hidden, row_map)
        assert session.position == 2 + num_tokens
        await scene.add("new", start, stop)

        assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))
        assert torch.equal(await session.step(draw(3, 1, rows)), oracle.step(draw(3, 1, rows)))

    def at_last_piece(scene: Scene, name: str) -> Iterator[Mischief]:
        count = 0

        def mischief(message: Message, answer: Answer) -> Answer:
            nonlocal count
            if isinstance(message, Step):
                count += 1
                if count == -(-num_tokens // 3):
                    scene.network.kill(name)
                    return None
            return answer

        yield mischief

    run(test, config=replace(CONFIG, max_step_bytes=3 * 3 * WIDTH * 4))


@pytest.mark.parametrize("row_map", [None, (1, 0)], ids=["plain", "rows"])
def test_step_that_is_cancelled_anywhere_can_be_tried_again(
    row_map: tuple[int, ...] | None,
) -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(1000), Oracle()
        # Opening takes two round trips of 0.1 s, and a step one for each hop.
        for index in range(14):
            hidden = draw(index, 2, 2)
            task = asyncio.create_task(session.step(hidden, row_map))
            await asyncio.sleep(0.05 * index)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                assert torch.equal(task.result(), oracle.step(hidden, row_map))
            assert torch.equal(await session.step(hidden, row_map), oracle.step(hidden, row_map))

        assert scene.quarantined == []

    run(test, Link(delay_seconds=0.05))


def test_opening_that_is_cancelled_leaves_nothing_at_the_peers() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        # One of the hops is slower, so that the others are open when it ends.
        for name in ("c1", "c2"):
            scene.network.set_link("client", name, Link(delay_seconds=0.3))
        session = scene.open_session()
        task = asyncio.create_task(session.step(draw(1)))
        await asyncio.sleep(0.25)
        opened = [name for name, peer in scene.peers.items() if peer.caches]
        assert opened
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(30)

        # The session was not closed, and still nobody holds anything.
        assert [name for name, peer in scene.peers.items() if peer.caches] == []

    run(test, Link(delay_seconds=0.01))


def test_restarted_peer_is_used_again_and_not_blamed() -> None:
    async def test(scene: Scene) -> None:
        peer = await scene.add("a", 0, 6)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))

        peer.caches.clear()

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        assert len(session.failovers) == 1
        assert scene.quarantined == []

    run(test)


def test_newcomer_is_found_when_everybody_known_is_silent() -> None:
    async def test(scene: Scene) -> None:
        for name in ("a1", "a2"):
            await scene.add(name, 0, 6)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        for name in ("a1", "a2"):
            scene.network.pause(name)
        await scene.add("new", 0, 6)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        assert scene.names_of(session) == ["new"]

    run(test)


def test_silent_peer_that_goes_on_after_its_replacement_disturbs_nobody() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        silent = scene.peer_of(session, 1)
        scene.network.pause(silent.name)
        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        scene.network.resume(silent.name)

        for index in range(3, 8):
            assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))
        await asyncio.sleep(1)

        assert silent.caches == {}

    run(test)


def test_only_peer_that_was_silent_for_a_while_is_used_again() -> None:
    async def test(scene: Scene) -> None:
        await scene.add("a", 0, 6)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        scene.network.pause("a")
        asyncio.get_running_loop().call_later(7, scene.network.resume, "a")

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
        assert 7 <= now() < 15

    run(test)


def test_replacement_of_the_same_weights_is_preferred() -> None:
    async def test(scene: Scene) -> None:
        await scene.add("a", 0, 6, weights="int8")
        session = scene.open_session()
        await session.step(draw(1, 3))
        await scene.add("fast", 0, 6, weights="fp32", decode_steps_per_second=1e6)
        await scene.add("same", 0, 6, weights="int8")
        scene.network.kill("a")
        await scene.swarm.refresh()

        await session.step(draw(2))
        assert scene.names_of(session) == ["same"]
        assert session.failovers[-1].changed_weights is None
        scene.network.kill("same")
        await session.step(draw(3))
        assert scene.names_of(session) == ["fast"]
        assert session.failovers[-1].changed_weights == "fp32"

    run(test)


def test_epochs_and_sequences_grow_and_ids_are_apart() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        for index in range(6):
            if index in (2, 4):
                scene.network.kill(scene.peer_of(session, index // 2).name)
            assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))

        peers = scene.peers.values()
        ids = [opening.session for peer in peers for opening in peer.opens]
        assert len(ids) == len(set(ids)) == 5
        assert SECRET not in ids
        assert sorted(opening.epoch for peer in peers for opening in peer.opens) == [1, 1, 1, 2, 3]
        for peer in peers:
            epochs = [step.epoch for step in peer.steps]
            sequences = [step.sequence for step in peer.steps]
            assert epochs == sorted(epochs)
            assert sequences == sorted(set(sequences))

    run(test)


def test_sessions_side_by_side_do_not_meet() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)

        async def live(number: int) -> None:
            session, oracle = scene.open_session(secret=SessionId(bytes([number]) * 16)), Oracle()
            for index in range(10):
                hidden = draw(100 * number + index, 1 + number % 3)
                assert torch.equal(await session.step(hidden), oracle.step(hidden))

        lives = asyncio.gather(*(live(number) for number in range(12)))
        await asyncio.sleep(0.3)
        scene.network.kill("b1")
        scene.network.pause("c2")
        await lives

    run(test, Link(delay_seconds=0.02))


def test_closing_frees_every_peer_and_ends_the_session() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session = scene.open_session()
        await session.step(draw(1, 3))
        assert sum(len(peer.caches) for peer in scene.peers.values()) == 3

        await session.close()
        await session.close()
        await asyncio.sleep(1)

        assert sum(len(peer.caches) for peer in scene.peers.values()) == 0
        assert session.hops == ()
        with pytest.raises(UsageError, match="closed"):
            await session.step(draw(2))

    run(test)


def test_directory_that_cannot_be_read_does_not_stop_a_failover() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        assert torch.equal(await session.step(draw(1)), oracle.step(draw(1)))
        await asyncio.sleep(100)
        scene.store.is_reachable = False
        scene.network.kill(scene.peer_of(session, 1).name)

        assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    run(test)


def test_link_with_losses_and_delay_changes_nothing() -> None:
    async def test(scene: Scene) -> None:
        await add_two_rows_of_peers(scene)
        session, oracle = scene.open_session(), Oracle()
        for index in range(30):
            try:
                output = await session.step(draw(index))
            except UnavailableError:
                output = await session.step(draw(index))
            assert torch.equal(output, oracle.step(draw(index)))

    run(test, Link(delay_seconds=0.05, loss_fraction=0.1))
