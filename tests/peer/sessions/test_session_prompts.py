"""Deep prompts of a session come behind `Open`, and steps wait for them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import torch
from service_scene import (
    SPAN,
    Peer,
    Talk,
    assert_declined,
    compute_alone,
    draw_hidden,
    expect_output,
    make_open,
    make_session,
    make_step,
    with_peer,
)
from torch import Tensor

from shoal.client.session.deep_prompts import encode_prompts
from shoal.peer.engine.engine import Engine
from shoal.peer.sessions.admission import MAX_PROMPT_BYTES
from shoal.protocol.errors import ErrorCode
from shoal.protocol.fair_share import Tenant
from shoal.protocol.messages.passes import PassPiece
from shoal.protocol.messages.session import Close, Opened, Queued
from shoal.protocol.tensors import WireDtype

PROMPTS = 0.3 * draw_hidden(5, len(SPAN), 2)
TEXT = draw_hidden(1, 1, 4)


def make_pieces(number: int = 1, prompts: Tensor = PROMPTS) -> list[PassPiece]:
    return encode_prompts(make_session(number), prompts, WireDtype.FP32)


async def step(talk: Talk) -> Tensor:
    return expect_output(await talk.ask(make_step(1, 0, TEXT)))


@with_peer()
async def test_session_is_opened_when_its_prompts_are_here(peer: Peer, engine: Engine) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2))
    other = await peer.greet()
    await other.wait_until_read()
    assert peer.service.prompts.used_bytes == PROMPTS.numel() * 4

    assert isinstance(await talk.ask(make_pieces()[0]), Opened)
    output = await step(talk)

    (without,) = compute_alone(engine, TEXT)
    assert not torch.allclose(output, without, atol=1e-2)
    await talk.say(Close(make_session(1), 1))
    await talk.wait_until_read()
    assert peer.service.prompts.used_bytes == 0


class ThreadNotingEngine:
    """An engine that notes on which threads it places prompts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.threads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def place_prompts(self, prompts: Tensor) -> Tensor:
        self.threads.append(threading.current_thread().name)
        return self._engine.place_prompts(prompts)


@with_peer(wrap=ThreadNotingEngine)
async def test_prompts_are_placed_by_the_compute_thread(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2), *make_pieces())
    assert isinstance(await talk.hear(), Opened)
    assert peer.engine.threads == ["compute"]


@with_peer()
async def test_prompts_that_never_come_are_forgotten_with_their_stream(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2))
    await (await peer.greet()).wait_until_read()

    await talk.stream.close()
    await peer.wait_until_empty()

    assert peer.service.prompts.used_bytes == 0


@with_peer()
async def test_session_is_not_opened_again_without_the_prompts_that_it_waits_for(
    peer: Peer,
) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2))

    assert_declined(await talk.ask(make_open()), ErrorCode.BAD_FRAME)
    assert not peer.service.admission.sessions
    assert isinstance(await talk.ask(make_pieces()[0]), Opened)


@with_peer()
async def test_peer_is_not_empty_while_prompts_come(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2))
    await (await peer.greet()).wait_until_read()

    assert not await peer.service.wait_until_empty(1.0)


@with_peer()
async def test_peer_is_empty_as_soon_as_the_session_is_closed_whose_prompts_come(
    peer: Peer,
) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2))
    await talk.wait_until_read()
    waiting = asyncio.create_task(peer.service.wait_until_empty(60.0))
    await talk.say(Close(make_session(1), 1))  # and keep the stream
    assert await asyncio.wait_for(waiting, 1.0)


@with_peer()
async def test_session_that_no_peer_could_open_is_refused_before_its_prompts_come(
    peer: Peer,
) -> None:
    too_long = replace(make_open(prompt_rows=1, prompt_tokens=2), max_tokens=10**6)

    assert_declined(await (await peer.greet()).ask(too_long), ErrorCode.TOO_LONG)


@with_peer()
async def test_prompts_of_a_refused_session_are_passed_over(peer: Peer) -> None:
    talk = await peer.greet()
    opening = make_open(prompt_rows=1, prompt_tokens=2, max_tokens=10_000)

    await talk.say(opening, *make_pieces())

    assert_declined(await talk.hear(), ErrorCode.TOO_LONG)
    await talk.say(make_open(2, prompt_rows=1, prompt_tokens=2), *make_pieces(2))
    assert isinstance(await talk.hear(), Opened)


@with_peer(max_sessions=1)
async def test_session_that_waits_for_room_keeps_its_prompts(peer: Peer) -> None:
    first = await peer.at_host("first").open(7)
    talk = await peer.at_host("second").greet()

    opening = make_open(prompt_rows=1, prompt_tokens=2, max_wait_seconds=100.0)
    await talk.say(opening, *make_pieces())
    assert isinstance(await talk.hear(), Queued)
    await first.say(Close(make_session(7), 1))

    assert isinstance(await talk.hear(), Opened)
    await step(talk)


@with_peer()
async def test_pieces_that_do_not_belong_there_end_the_stream(peer: Peer) -> None:
    (piece,) = make_pieces()
    for wrong in (replace(piece, offset=1), *make_pieces(prompts=PROMPTS[:1])):
        talk = await peer.greet()
        await talk.say(make_open(prompt_rows=1, prompt_tokens=2), wrong)
        assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
        await talk.stream.close()
        await peer.wait_until_empty()


@with_peer()
async def test_prompts_that_are_no_numbers_are_refused(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2), *make_pieces(prompts=PROMPTS / 0))
    assert_declined(await talk.hear(), ErrorCode.BAD_VALUES)


@with_peer()
async def test_prompts_beyond_the_budget_are_refused(peer: Peer) -> None:
    peer.service.prompts.count(Tenant("somebody else"), MAX_PROMPT_BYTES)
    talk = await peer.greet()
    await talk.say(make_open(prompt_rows=1, prompt_tokens=2), *make_pieces())
    assert_declined(await talk.hear(), ErrorCode.BUSY)
    peer.service.prompts.count(Tenant("somebody else"), -MAX_PROMPT_BYTES)
    await asyncio.sleep(0)
