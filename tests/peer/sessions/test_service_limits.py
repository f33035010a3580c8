"""What strangers may hold of a peer: sessions, streams, cache, memory, patience."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from service_scene import (
    HELLO,
    HIDDEN,
    SPAN,
    DeafStream,
    Peer,
    assert_declined,
    compute_alone,
    draw_hidden,
    expect_output,
    make_open,
    make_session,
    make_step,
    run,
    with_peer,
)
from virtual_time import VirtualClock

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.process.config import PeerConfig
from shoal.peer.streams import client_stream
from shoal.peer.streams.stream_host import MAX_PENDING_BYTES, Limits, PendingBytes
from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode, UnavailableError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.ids import ClientToken
from shoal.protocol.messages.codec import decode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Close, Gap, Opened, Output, Step
from shoal.protocol.net.transport import FrameGate, open_gate
from shoal.protocol.session.session_state import MAX_CACHED_ANSWER_BYTES, MAX_CACHED_ANSWERS
from shoal.protocol.tensors import WireDtype, WireTensor


@with_peer(max_sessions=3)
async def test_peer_holds_so_many_sessions_and_no_more(peer: Peer) -> None:
    talks = [await peer.at_host(f"host {number}").open(number) for number in (1, 2, 3)]

    refusal = assert_declined(await talks[0].ask(make_open(4)), ErrorCode.BUSY)
    assert refusal.retry_after_seconds
    await talks[1].say(Close(make_session(2), 1))
    await talks[1].wait_until_read()

    assert isinstance(await talks[0].ask(make_open(4)), Opened)


@with_peer(max_sessions=8)
async def test_one_address_holds_no_more_sessions_than_it_leaves_free(peer: Peer) -> None:
    talks = [await peer.dial() for _ in range(6)]
    for number, talk in enumerate(talks):
        await talk.ask(replace(HELLO, client=ClientToken(bytes([number] * 16))))
    for number, talk in enumerate(talks[:5]):
        assert isinstance(await talk.ask(make_open(number)), Opened)

    refusal = assert_declined(await talks[0].ask(make_open(5)), ErrorCode.BUSY)
    assert_declined(await talks[5].ask(make_open(5)), ErrorCode.BUSY)
    neighbour = await peer.at_host("neighbour").open(6)
    assert isinstance(await neighbour.ask(make_open(7)), Opened)
    assert_declined(await neighbour.ask(make_open(8)), ErrorCode.BUSY)
    await peer.at_host("newcomer").open(9)

    assert refusal.retry_after_seconds
    for talk in talks:
        await talk.stream.close()
    await peer.at_host("newcomer").open(10)


@with_peer(max_sessions=8)
async def test_clients_of_one_address_do_not_shut_each_other_out(peer: Peer) -> None:
    greedy = await peer.dial()
    await greedy.ask(replace(HELLO, client=ClientToken(b"g" * 16)))
    for number in range(1, 4):
        assert isinstance(await greedy.ask(make_open(number)), Opened)
    assert_declined(await greedy.ask(make_open(4)), ErrorCode.BUSY)

    other = await peer.dial()
    await other.ask(replace(HELLO, client=ClientToken(b"o" * 16)))
    assert isinstance(await other.ask(make_open(5)), Opened)


@with_peer(max_sessions=2)
async def test_one_address_holds_no_more_streams_than_it_leaves_free(peer: Peer) -> None:
    talks = [await peer.greet() for _ in range(5)]

    one_too_many = await peer.dial()
    refusal = assert_declined(await one_too_many.hear(), ErrorCode.BUSY)
    await peer.at_host("neighbour").greet()

    assert refusal.session is None
    assert refusal.retry_after_seconds
    assert await one_too_many.hear() is None
    for talk in talks[:2]:
        await talk.stream.close()
    while len(peer.service.streams) > 4:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0.1)
    await peer.greet()


@with_peer(gate="open", max_sessions=2)
async def test_sessions_being_opened_count(peer: Peer) -> None:
    talks = [await peer.greet() for _ in range(3)]
    for number, talk in enumerate(talks):
        await talk.say(make_open(number))
    await peer.engine.wait_entered()
    peer.engine.leave.set()

    answers = [await talk.hear() for talk in talks]

    assert sorted(type(answer).__name__ for answer in answers) == ["Declined"] + 2 * ["Opened"]


@with_peer(max_sessions=100)
async def test_one_stream_holds_so_many_sessions(peer: Peer) -> None:
    talk = await peer.greet()
    for number in range(limits.MAX_SESSIONS_PER_STREAM):
        assert isinstance(await talk.ask(make_open(number)), Opened)

    assert_declined(await talk.ask(make_open(200)), ErrorCode.BUSY)

    assert isinstance(await (await peer.greet()).ask(make_open(200)), Opened)


def test_session_larger_than_the_kv_budget_is_refused_for_good(tiny_models: Any) -> None:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    small = load_engine(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=2**15)

    async def test(peer: Peer) -> None:
        refusal = assert_declined(
            await (await peer.greet()).ask(make_open(num_rows=64)), ErrorCode.CACHE_FULL
        )

        assert refusal.retry_after_seconds is None

    run(small, test)


def test_step_that_outgrows_the_kv_budget_is_refused_and_can_be_tried_again(
    tiny_models: Any,
) -> None:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    # Room for three pages of 64 tokens of one row.
    page_bytes = 64 * 2 * len(SPAN) * 2 * 16 * 4
    small = load_engine(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=3 * page_bytes)
    prompt = draw_hidden(1, 1, 128)
    (wanted,) = compute_alone(small, prompt[:, :100])

    async def test(peer: Peer) -> None:
        first = await peer.open(1, max_tokens=128)
        second = await peer.open(2, max_tokens=128)
        expect_output(await first.ask(make_step(1, 0, prompt, number=1)))

        refusal = assert_declined(
            await second.ask(make_step(1, 0, prompt[:, :100], number=2)), ErrorCode.CACHE_FULL
        )
        assert (refusal.session, refusal.sequence) == (make_session(2), 1)
        assert refusal.retry_after_seconds
        await first.say(Close(make_session(1), 1))
        await first.wait_until_read()
        output = expect_output(await second.ask(make_step(2, 0, prompt[:, :100], number=2)))

        assert torch.equal(output, wanted)

    run(small, test)


@with_peer()
async def test_one_address_leaves_some_of_the_kv_budget_to_the_next(peer: Peer) -> None:
    talk = await peer.greet()
    opening = make_open(1, num_rows=32, max_tokens=129)
    refusal = assert_declined(await talk.ask(opening), ErrorCode.CACHE_FULL)
    assert refusal.retry_after_seconds is None  # not even when the peer is empty
    greedy = await peer.open(1, num_rows=32, max_tokens=128)
    expect_output(await greedy.ask(make_step(1, 0, draw_hidden(1, 32, 128))))
    refusal = assert_declined(await greedy.ask(make_open(2, num_rows=32)), ErrorCode.CACHE_FULL)
    assert refusal.retry_after_seconds

    newcomer = await peer.at_host("newcomer").open(3)
    expect_output(await newcomer.ask(make_step(1, 0, draw_hidden(1, 1, 100), number=3)))


@with_peer()
async def test_repeat_of_a_token_is_answered_again_and_that_of_a_prompt_is_not(peer: Peer) -> None:
    """The answers of tokens fit into a corner of the memory; those of prompts would fill it."""

    num_rows, num_tokens = 8, 90
    prompt, token = draw_hidden(1, num_rows, num_tokens), draw_hidden(2, num_rows, 1)
    assert prompt.nbytes > MAX_CACHED_ANSWER_BYTES

    talk = await peer.open(num_rows=num_rows)
    expect_output(await talk.ask(make_step(1, 0, prompt)))
    answer = await talk.ask(make_step(2, num_tokens, token))

    await talk.say(make_step(1, 0, prompt))
    again = await talk.ask(make_step(2, num_tokens, token))

    assert isinstance(answer, Output)
    assert again == answer


@with_peer()
async def test_repeat_needs_no_room(peer: Peer, engine: Engine) -> None:
    """Nor does a step that is dropped or misses its prefix: neither waits for the engine."""

    talk, first = await peer.open(), make_step(1, 0, draw_hidden(1))
    answer = await talk.ask(first)
    pending, others = peer.service.pending, Tenant("others")
    pending.count(others, MAX_PENDING_BYTES)

    assert await talk.ask(first) == answer
    assert isinstance(await talk.ask(make_step(2, 9, draw_hidden(2))), Gap)
    await talk.say(make_step(0, 1, draw_hidden(2)))
    assert_declined(await talk.ask(make_step(3, 1, draw_hidden(2))), ErrorCode.BUSY)

    pending.count(others, -MAX_PENDING_BYTES)


def test_kept_answers_of_all_sessions_of_a_peer_are_bounded() -> None:
    num_sessions = PeerConfig.max_sessions

    assert num_sessions * MAX_CACHED_ANSWERS * MAX_CACHED_ANSWER_BYTES <= 64 * 2**20


@with_peer()
async def test_step_whose_answer_would_not_fit_a_frame_is_refused(peer: Peer) -> None:
    width, tokens = 4096, 1500  # 12 MB as bf16, 24 MB as fp32
    data = bytes(2 * width * tokens)
    hidden = WireTensor(WireDtype.BF16, 1, tokens, width, data)

    talk = await peer.open(max_tokens=512)
    talk_of = Step(make_session(1), 1, 1, 0, hidden)

    refusal = assert_declined(await talk.ask(talk_of), ErrorCode.TOO_LONG)

    assert refusal.session == make_session(1)
    expect_output(await talk.ask(make_step(2, 0, draw_hidden(1))))


@pytest.mark.parametrize("says_hello", [False, True])
@with_peer(idle_seconds=24 * 3600)
async def test_stream_without_a_session_is_ended_soon(peer: Peer, says_hello: bool) -> None:
    talk = await peer.greet() if says_hello else await peer.dial()

    assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)

    assert VirtualClock().now() < 60
    assert await talk.hear() is None


@with_peer()
async def test_second_hello_ends_the_stream(peer: Peer) -> None:
    talk = await peer.open()

    assert_declined(await talk.ask(HELLO), ErrorCode.BAD_FRAME)

    assert await talk.hear() is None
    await peer.wait_until_empty()


@pytest.mark.parametrize("holds_session", [False, True])
@with_peer(idle_seconds=100.0)
async def test_questions_that_are_refused_keep_no_stream_alive(
    peer: Peer, holds_session: bool
) -> None:
    talk = await peer.open() if holds_session else await peer.greet()
    hidden = draw_hidden(1)
    answers: list[Message | None] = []
    while answers[-1:] != [None]:
        await asyncio.sleep(15)
        assert VirtualClock().now() < (150 if holds_session else 60)
        for question in (
            make_step(1, 0, hidden, number=9),  # unknown
            make_step(1, 7, hidden, number=1),  # unknown, or a gap
            make_step(0, 0, hidden, number=1),  # unknown, or dropped
            Close(make_session(9), 1),
            make_open(9, max_tokens=10**6),
        ):
            with contextlib.suppress(UnavailableError):
                await talk.say(question)
        async with asyncio.timeout(1):
            answers += [await talk.hear() for _ in range(3)]


@with_peer(idle_seconds=100.0)
async def test_stream_lives_on_when_its_session_is_closed(peer: Peer) -> None:
    talk = await peer.open()
    for sequence in range(1, 4):
        await asyncio.sleep(60)
        expect_output(await talk.ask(make_step(sequence, 0, draw_hidden(1))))
    await asyncio.sleep(60)
    await talk.say(Close(make_session(1), 1))
    await asyncio.sleep(15)

    assert isinstance(await talk.ask(make_open(2)), Opened)


@with_peer(max_sessions=40)
async def test_clients_that_do_not_read_answers_shut_nobody_out_and_are_gone_soon(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw_hidden(1, 1, 100)
    monkeypatch.setattr(client_stream, "MAX_STREAM_PENDING_BYTES", 2 * prompt.nbytes)

    peer.service.pending = PendingBytes(64 * prompt.nbytes)
    async with asyncio.TaskGroup() as tasks:
        for number in range(14):
            steps = [make_step(sequence, 0, prompt, number) for sequence in range(1, 5)]
            stream = DeafStream(HELLO, make_open(number), *steps)
            tasks.create_task(peer.service.serve(stream))
        await asyncio.sleep(1)
        assert peer.service.pending.used_bytes > 14 * prompt.nbytes

        talk = await peer.open(99)
        expect_output(await talk.ask(make_step(1, 0, prompt, 99)))

    assert VirtualClock().now() < 60
    assert list(peer.service.sessions) == [make_session(99)]
    assert peer.service.pending.used_bytes == 0


def make_large_step(sequence: int, position: int) -> Step:
    """Return a step whose frame travels in pieces."""
    step = make_step(sequence, position, draw_hidden(1, 16, 80))
    assert len(step.hidden.data) > limits.MAX_PIECE_BYTES
    return step


@with_peer()
async def test_large_frame_waits_for_room_and_counts_while_it_arrives(peer: Peer) -> None:
    pending = peer.service.pending = PendingBytes(2**21)
    talk = await peer.open(num_rows=16)
    tenant = Tenant("client")
    pending.count(tenant, 2**18)
    await talk.say(make_large_step(1, 0))
    hearing = asyncio.create_task(talk.hear())
    await asyncio.sleep(5)
    assert not hearing.done()

    pending.count(tenant, -(2**18))

    expect_output(await hearing)
    assert pending.used_bytes == 0


@with_peer()
async def test_large_frame_without_room_is_refused_in_the_end(peer: Peer) -> None:
    peer.service.pending = PendingBytes(2**18)
    talk = await peer.open(num_rows=16)

    await talk.say(make_large_step(1, 0))

    refusal = assert_declined(await talk.hear(), ErrorCode.BUSY)
    assert refusal.session is None
    assert refusal.retry_after_seconds
    assert await talk.hear() is None
    assert VirtualClock().now() < 60


@with_peer()
async def test_large_frame_before_hello_is_not_let_in(peer: Peer) -> None:
    talk = await peer.dial()

    await talk.say(make_large_step(1, 0))

    assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
    assert await talk.hear() is None


class SlowStream(DeafStream):
    """A stream whose last frame takes long to arrive; notes what is sent to it."""

    def __init__(self, seconds: float, *messages: Message) -> None:
        super().__init__(*messages)
        self._seconds = seconds
        self._gate: FrameGate = open_gate
        self._reading: asyncio.Task[bytes] | None = None
        self.heard: list[Message] = []

    def set_gate(self, gate: FrameGate) -> None:
        self._gate = gate

    async def send(self, frame: bytes) -> None:
        self.heard.append(decode_frame(frame))

    async def receive(self) -> bytes | None:
        if len(self._frames) == 1:
            self._reading = asyncio.create_task(self._read_slowly())
        if self._reading is None:
            return await super().receive()
        frame = await asyncio.shield(self._reading)
        self._reading = None
        return frame

    async def _read_slowly(self) -> bytes:
        frame = self._frames.pop()
        async with self._gate(len(frame)):
            await asyncio.sleep(self._seconds)
        return frame


@with_peer()
async def test_stream_is_not_idle_while_a_large_frame_arrives(peer: Peer) -> None:
    stream = SlowStream(50.0, HELLO, make_large_step(1, 0))

    await peer.service.serve(stream)

    _, refusal, _ = stream.heard
    assert assert_declined(refusal, ErrorCode.UNKNOWN_SESSION).session == make_session(1)


async def let_others_run() -> None:
    """Let the loop turn while the engine stands at its gate, and virtual time with it."""
    for _ in range(200):
        await asyncio.sleep(0)


@with_peer(gate="execute")
async def test_steps_of_a_stream_that_broke_count_until_they_are_computed(peer: Peer) -> None:
    prompt = draw_hidden(1, 1, 60)  # a larger frame would wait for room

    peer.service.pending = PendingBytes(16 * prompt.nbytes)
    talk = await peer.open()
    held = peer.service.sessions[make_session(1)]
    for number in range(6):
        bulk = await peer.at_host("cut").greet()
        await bulk.say(make_step(1 + number, 0, prompt))
        if number < 4:
            await let_others_run()
        else:
            assert_declined(await bulk.hear(), ErrorCode.BUSY)
        peer.network.kill("cut")
        await let_others_run()
        peer.network.revive("cut")

    assert len(held.cache.running) == 4
    assert peer.service.pending.used_bytes == 4 * prompt.nbytes
    peer.engine.leave.set()
    expect_output(await talk.ask(make_step(9, 0, prompt)))
    assert peer.service.pending.used_bytes == 0
    assert not held.cache.running


@with_peer(gate="execute")
async def test_break_of_a_stream_is_noticed_while_it_waits_for_the_engine(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw_hidden(1, 1, 50)
    monkeypatch.setattr(client_stream, "MAX_STREAM_PENDING_BYTES", prompt.nbytes)

    talk = await peer.open()
    await talk.say(*(make_step(1 + n, 0, prompt) for n in range(3)))
    await peer.engine.wait_entered()
    await let_others_run()

    peer.network.kill("client")
    await let_others_run()

    assert not peer.service.streams
    assert not peer.service.sessions
    peer.engine.leave.set()
    peer.network.revive("client")


@with_peer(gate="execute")
async def test_stream_says_how_its_steps_ended_also_when_it_broke(peer: Peer) -> None:
    talk, bulk = await peer.open(), await peer.at_host("cut").greet()
    await bulk.say(make_step(1, 0, torch.full((1, 3, HIDDEN), float("nan"))))
    await peer.engine.wait_entered()
    peer.network.kill("cut")
    await let_others_run()
    peer.engine.leave.set()
    while peer.service.pending.used_bytes:  # noqa: ASYNC110 - a test on virtual time
        await asyncio.sleep(0)

    gap = await talk.ask(make_step(2, 3, draw_hidden(1)))
    assert isinstance(gap, Gap)
    assert gap.length == 0


@with_peer(max_sessions=8)
async def test_limits_may_change_while_sessions_are_open(peer: Peer) -> None:
    hosts = [peer.at_host(f"host {number}") for number in range(5)]
    talks = [await host.open(number) for number, host in enumerate(hosts[:3])]
    roomy = Limits(8, peer.engine.pool.budget_bytes, 2**28, 2**24)

    peer.service.apply_limits(replace(roomy, max_sessions=3))
    late = await hosts[3].greet()
    assert_declined(await late.ask(make_open(3)), ErrorCode.BUSY)
    expect_output(await talks[0].ask(make_step(1, 0, draw_hidden(1), number=0)))

    peer.service.apply_limits(replace(roomy, max_sessions=4))
    assert isinstance(await late.ask(make_open(3)), Opened)

    peer.service.apply_limits(replace(roomy, kv_bytes=0))
    later = await hosts[4].greet()
    assert_declined(await later.ask(make_open(4)), ErrorCode.CACHE_FULL)
    expect_output(await talks[0].ask(make_step(2, 1, draw_hidden(2), number=0)))
    assert peer.service.measure()["kv_used_bytes"] > 0

    peer.service.apply_limits(roomy)
    await peer.compute.call(bool)  # behind the change of the pool
    assert isinstance(await later.ask(make_open(4)), Opened)
