"""How sessions and streams end, in good order or not: nothing of them may be left."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch
from service_scene import (
    HELLO,
    HIDDEN,
    IDLE_SECONDS,
    PatientStream,
    Peer,
    Talk,
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

from shoal.peer.engine.engine import Engine
from shoal.protocol.errors import ErrorCode, SilentError
from shoal.protocol.ids import CLIENT_TOKEN_BYTES, ClientToken
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Close, Gap, Hello, Leaving, Opened, Welcome
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.tensors import WireDtype
from shoal.protocol.versions import HANDOFF_VERSION


def test_hanging_up_on_a_session_is_quiet(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Its client is told at the same time that it should leave."""

    async def test(peer: Peer) -> None:
        talk = await peer.dial()
        await talk.ask(Hello(1, HANDOFF_VERSION, "a test"))
        assert isinstance(await talk.ask(make_open()), Opened)

        await peer.service.hang_up()

        assert await talk.hear() is None
        await talk.stream.close()

    run(engine, test)
    assert caplog.messages == []


@with_peer()
async def test_close_frees_the_pages_and_the_stream_goes_on(peer: Peer) -> None:
    talk = await peer.open()
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, 1, 90))))
    assert await peer.count_used_bytes() > 0

    await talk.say(Close(make_session(1), 1), Close(make_session(1), 1))
    answer = await talk.ask(make_step(2, 90, draw_hidden(1)))

    assert_declined(answer, ErrorCode.UNKNOWN_SESSION)
    assert await peer.count_used_bytes() == 0
    assert isinstance(await talk.ask(make_open(1)), Opened)


@with_peer(gate="open")
async def test_stream_that_breaks_while_a_session_is_opened_leaves_nothing(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_open())
    await peer.engine.wait_entered()

    peer.network.kill("client")
    peer.engine.leave.set()

    await peer.wait_until_empty()
    peer.network.revive("client")


@with_peer(gate="execute")
async def test_stream_that_breaks_while_a_step_is_computed_leaves_nothing(peer: Peer) -> None:
    talk = await peer.open()
    await talk.say(make_step(1, 0, draw_hidden(1, 1, 90)), make_step(2, 90, draw_hidden(2)))
    await peer.engine.wait_entered()

    peer.network.kill("client")
    peer.engine.leave.set()

    await peer.wait_until_empty()
    peer.network.revive("client")


def test_broken_stream_is_gone_without_a_garbage_collection(engine: Engine) -> None:
    """Of its frames of 16 MiB, any number could wait for the next one."""

    async def test(peer: Peer) -> None:
        talk = await peer.open()
        expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, 1, 90))))
        nothing = torch.full((1, 1, HIDDEN), torch.nan)
        assert_declined(await talk.ask(make_step(2, 90, nothing)), ErrorCode.BAD_VALUES)
        (conversation,) = peer.service.streams
        (held,) = peer.service.sessions.values()
        remains = [weakref.ref(conversation), weakref.ref(held.cache), weakref.ref(held.outputs)]
        del conversation, held

        peer.network.kill("client")
        await peer.wait_until_empty()

        assert [remain() for remain in remains] == [None, None, None]
        peer.network.revive("client")

    gc.disable()
    try:
        run(engine, test)
    finally:
        gc.enable()


@with_peer(gate="open")
async def test_serving_that_is_cancelled_while_a_session_is_opened_leaves_nothing(
    peer: Peer,
) -> None:
    serving = asyncio.create_task(peer.service.serve(PatientStream(HELLO, make_open())))
    await peer.engine.wait_entered()
    serving.cancel()
    await asyncio.wait([serving])
    peer.engine.leave.set()

    await peer.wait_until_empty()


class HaltingStream(PatientStream):
    """A stream of a client that stopped in the middle of a large frame."""

    def __init__(self) -> None:
        super().__init__(HELLO)
        self.heard: list[Message] = []

    async def receive(self) -> bytes | None:
        if not self._frames:
            raise SilentError("part of a frame")
        return await super().receive()

    async def send(self, frame: bytes) -> None:
        self.heard.append(decode_frame(frame))


@with_peer()
async def test_client_that_is_too_slow_with_a_frame_hears_that_it_may_come_again(
    peer: Peer,
) -> None:
    stream = HaltingStream()

    await peer.service.serve(stream)

    welcome, declined = stream.heard
    assert isinstance(welcome, Welcome)
    assert_declined(declined, ErrorCode.BUSY)


@with_peer(gate="execute")
async def test_steps_that_wait_when_their_session_is_closed_are_never_computed(peer: Peer) -> None:
    talk = await peer.open()
    await talk.say(*(make_step(index + 1, index, draw_hidden(index)) for index in range(3)))
    await peer.engine.wait_entered()
    await talk.say(Close(make_session(1), 1))
    assert await peer.service.wait_until_empty(60)
    await asyncio.wait_for(talk.wait_until_read(), 60)
    assert peer.service.pending.used_bytes == 3 * draw_hidden(0).nbytes, "still in memory"
    peer.engine.leave.set()

    # None of the three is answered any more; what comes later is.
    assert isinstance(await talk.ask(make_open(2)), Opened)
    await peer.count_used_bytes()
    assert peer.engine.num_steps == 1
    assert peer.service.pending.used_bytes == 0


@with_peer()
async def test_answers_to_a_client_that_said_its_last_word_still_leave(peer: Peer) -> None:
    talk = await peer.open()
    await talk.say(make_step(1, 0, draw_hidden(1)))

    await talk.stream.send(encode_frame(Close(make_session(9), 1)))
    answer = await talk.hear()
    await talk.stream.close()

    expect_output(answer)
    await peer.wait_until_empty()


@with_peer(max_sessions=256)
async def test_thousand_aborted_sessions_leave_nothing(peer: Peer) -> None:
    for number in range(1000):
        client = LoopbackTransport(peer.network, f"client {number}")
        talk = Talk(await client.open_stream(peer.endpoint))
        await talk.say(HELLO, make_open(number))
        if number % 2:
            await talk.say(make_step(1, 0, draw_hidden(number, 1, 1 + number % 5), number))
        if number % 3:
            await talk.hear()
        peer.network.kill(f"client {number}")
        await client.close()

    await peer.wait_until_empty()

    await peer.open(1)


@with_peer(fails_at="execute")
async def test_engine_that_fails_answers_internal_and_goes_on(peer: Peer, engine: Engine) -> None:
    hidden = draw_hidden(1, 1, 3)
    (wanted,) = compute_alone(engine, hidden)

    talk = await peer.open()

    refusal = assert_declined(await talk.ask(make_step(1, 0, hidden)), ErrorCode.INTERNAL)
    output = expect_output(await talk.ask(make_step(2, 0, hidden)))

    assert "fire" not in refusal.detail
    assert torch.equal(output, wanted)


@with_peer(gate="execute")
async def test_steps_behind_one_whose_answer_fp16_cannot_hold_fall_with_it(
    peer: Peer, engine: Engine
) -> None:
    first, fourth = draw_hidden(1, 1, 3), draw_hidden(4)
    _, wanted = compute_alone(engine, first, fourth)

    talk = await peer.open(dtype=WireDtype.FP16)
    await talk.say(
        make_step(1, 0, first),
        make_step(2, 3, torch.full((1, 1, HIDDEN), 1e5)),
        make_step(3, 4, draw_hidden(3)),
    )
    await peer.engine.wait_entered()
    peer.engine.leave.set()

    expect_output(await talk.hear())
    assert_declined(await talk.hear(), ErrorCode.BAD_VALUES)
    gap = await talk.hear()
    assert isinstance(gap, Gap)
    assert (gap.sequence, gap.length) == (3, 3)
    output = expect_output(await talk.ask(make_step(4, 3, fourth)))
    assert torch.equal(output, wanted.to(torch.float16))


@with_peer(fails_at="open")
async def test_cache_that_cannot_be_opened_answers_internal_and_goes_on(peer: Peer) -> None:
    talk = await peer.greet()

    refusal = assert_declined(await talk.ask(make_open()), ErrorCode.INTERNAL)
    answer = await talk.ask(make_open())

    assert "fire" not in refusal.detail
    assert isinstance(answer, Opened)


@with_peer()
async def test_draining_peer_serves_old_sessions_and_takes_no_new_ones(peer: Peer) -> None:
    talk = await peer.open(1)
    peer.service.begin_draining()

    assert_declined(await talk.ask(make_open(2)), ErrorCode.DRAINING)
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1))))
    assert not await peer.service.wait_until_empty(10)
    waiting = asyncio.create_task(peer.service.wait_until_empty(1000))
    await talk.say(Close(make_session(1), 1))

    assert await waiting


@with_peer(gate="open")
async def test_session_that_is_being_opened_is_turned_down_by_a_peer_that_drains(
    peer: Peer,
) -> None:
    talk = await peer.greet()
    await talk.say(make_open(1))
    await peer.engine.wait_entered()
    peer.service.begin_draining()
    waiting = asyncio.create_task(peer.service.wait_until_empty(1000))
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.engine.leave.set()

    assert_declined(await talk.hear(), ErrorCode.DRAINING)
    assert await waiting


@with_peer()
async def test_peer_that_drains_says_so_in_every_session_to_who_understands_it(peer: Peer) -> None:
    idle, talk, old = await peer.dial(), await peer.dial(), await peer.open(9)
    for stream in (idle, talk):
        hello = Hello(1, HANDOFF_VERSION, "a test", ClientToken(bytes(CLIENT_TOKEN_BYTES)))
        assert isinstance(await stream.ask(hello), Welcome)
    for number in (1, 2):
        await talk.ask(make_open(number, epoch=number))

    peer.service.begin_draining()

    heard = [await talk.hear(), await talk.hear()]
    assert heard == [Leaving(make_session(1), 1), Leaving(make_session(2), 2)]
    for stream, number in ((talk, 1), (old, 9)):
        answer = await stream.ask(make_step(1, 0, draw_hidden(1), number))
        expect_output(answer)  # and nothing before it
    assert_declined(await idle.ask(make_open(3)), ErrorCode.DRAINING)


@with_peer()
async def test_idle_stream_is_ended_and_its_session_freed(peer: Peer) -> None:
    talk = await peer.open()
    await asyncio.sleep(IDLE_SECONDS - 1)
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1))))
    opened_at = VirtualClock().now()

    assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)

    assert VirtualClock().now() - opened_at == pytest.approx(IDLE_SECONDS)
    assert await talk.hear() is None
    await peer.wait_until_empty()


@with_peer()
async def test_session_that_is_stepped_over_another_stream_is_not_idle(peer: Peer) -> None:
    talk, bulk = await peer.open(), await peer.greet()

    for index in range(5):
        expect_output(await bulk.ask(make_step(index + 1, index, draw_hidden(index))))
        await asyncio.sleep(0.6 * IDLE_SECONDS)
    expect_output(await talk.ask(make_step(6, 5, draw_hidden(9))))
