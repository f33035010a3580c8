"""A peer's side of a stream, driven by hand over the loopback network on virtual time.

Every test ends with the same question: is nothing left? No session, page, task or unread error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from service_scene import (
    HIDDEN,
    MODEL_ID,
    PEER_ID,
    SPAN,
    Peer,
    assert_declined,
    draw_hidden,
    expect_output,
    make_open,
    make_session,
    make_step,
    with_peer,
)
from virtual_time import VirtualClock

from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Close, Declined, Gap, Hello, Opened, Welcome
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION


@with_peer()
async def test_hello_is_answered_with_who_the_peer_is(peer: Peer) -> None:
    answer = await (await peer.dial()).ask(Hello(0, MAX_VERSION + 4, "from the future"))

    assert isinstance(answer, Welcome)
    assert (answer.version, answer.peer_id, answer.model_id) == (MAX_VERSION, PEER_ID, MODEL_ID)
    assert answer.span == SPAN
    assert answer.wall_seconds == pytest.approx(VirtualClock().wall())


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (Hello(MAX_VERSION + 1, MAX_VERSION + 6, "too new"), ErrorCode.BAD_VERSION),
        (Hello(0, 0, "too old"), ErrorCode.BAD_VERSION),
        (make_open(), ErrorCode.BAD_FRAME),
        (make_step(1, 0, torch.zeros(1, 1, HIDDEN)), ErrorCode.BAD_FRAME),
        (Close(make_session(1), 1), ErrorCode.BAD_FRAME),
        (Declined(None, 0, ErrorCode.BUSY, "you are"), ErrorCode.BAD_FRAME),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, ErrorCode) else value.name,
)
@with_peer()
async def test_stream_that_begins_wrongly_is_ended_with_the_reason(
    peer: Peer, first: Message, code: ErrorCode
) -> None:
    talk = await peer.dial()

    assert assert_declined(await talk.ask(first), code).session is None
    assert await talk.hear() is None


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1, "me too", PEER_ID, MODEL_ID, SPAN, 0.0),
        Opened(make_session(1), 1, 0.0, 0),
        Gap(make_session(1), 1, 1, 0),
        Declined(make_session(1), 1, ErrorCode.BUSY, "you are"),
    ],
    ids=lambda message: type(message).__name__,
)
@with_peer()
async def test_messages_of_a_peer_are_not_taken_from_a_client(peer: Peer, message: Message) -> None:
    talk = await peer.open()

    assert assert_declined(await talk.ask(message), ErrorCode.BAD_FRAME).session is None
    assert await talk.hear() is None
    await peer.wait_until_empty()


@with_peer()
async def test_damaged_frame_ends_its_stream_and_no_other(peer: Peer) -> None:
    bystander = await peer.open(1)
    talk = await peer.open(2)

    await talk.stream.send(b"sh\x01" + bytes(200))

    assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
    assert await talk.hear() is None
    expect_output(await bystander.ask(make_step(1, 0, draw_hidden(1))))
    assert set(peer.service.sessions) == {make_session(1)}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_id": ModelId("b" * 32)}, ErrorCode.WRONG_MODEL),
        ({"span": Span(0, 2)}, ErrorCode.WRONG_SPAN),
        ({"span": Span(2, 4)}, ErrorCode.WRONG_SPAN),
        ({"span": Span(40, 41)}, ErrorCode.WRONG_SPAN),
        ({"max_tokens": 513}, ErrorCode.TOO_LONG),
        ({"max_tokens": limits.MAX_SESSION_TOKENS}, ErrorCode.TOO_LONG),
    ],
    ids=str,
)
@with_peer()
async def test_open_is_refused_and_the_stream_goes_on(
    peer: Peer, changes: dict[str, Any], code: ErrorCode
) -> None:
    talk = await peer.greet()

    answer = assert_declined(await talk.ask(make_open(**changes)), code)

    assert (answer.session, answer.sequence) == (make_session(1), 0)
    assert peer.service.sessions == {}
    assert isinstance(await talk.ask(make_open()), Opened)


@with_peer()
async def test_part_of_the_span_may_be_opened(peer: Peer) -> None:
    opened = await (await peer.greet()).ask(make_open(span=Span(2, 3), max_tokens=512))

    assert isinstance(opened, Opened)
    assert opened.free_kv_tokens > 0


@with_peer()
async def test_number_of_rows_beyond_the_limits_ends_the_stream(peer: Peer) -> None:
    talk = await peer.greet()
    # Our own encoder would not let it pass: field 4, with 200 and 16,383 as varints.
    frame = encode_frame(make_open(num_rows=200)).replace(b"\x20\xc8\x01", b"\x20\xff\x7f")

    await talk.stream.send(frame)

    assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
    assert await talk.hear() is None


@with_peer()
async def test_session_id_cannot_be_opened_twice(peer: Peer) -> None:
    owner, other = await peer.open(), await peer.greet()

    assert_declined(await owner.ask(make_open()), ErrorCode.BAD_FRAME)
    assert_declined(await other.ask(make_open(epoch=9)), ErrorCode.BAD_FRAME)
    await other.stream.close()

    expect_output(await owner.ask(make_step(1, 0, draw_hidden(1))))


@with_peer(gate="open")
async def test_session_id_cannot_be_opened_twice_at_once(peer: Peer) -> None:
    talks = [await peer.greet(), await peer.greet()]
    for talk in talks:
        await talk.say(make_open())
    await peer.engine.wait_entered()
    peer.engine.leave.set()

    answers = [await talk.hear() for talk in talks]

    (owner,) = [n for n, answer in enumerate(answers) if isinstance(answer, Opened)]
    assert_declined(answers[1 - owner], ErrorCode.BAD_FRAME)
    await talks[1 - owner].stream.close()
    expect_output(await talks[owner].ask(make_step(1, 0, draw_hidden(1))))
