"""Passes on a stream: honest ones are computed, others refused, and nothing is left."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from pass_talk import GRADIENTS, PROMPTS, ROWS, TEXTS, TOKENS, ask, cut, join, make_pass
from service_scene import (
    HIDDEN,
    SPAN,
    Peer,
    Talk,
    assert_declined,
    draw_hidden,
    expect_output,
    make_step,
    with_peer,
)
from torch import Tensor

from shoal.kernels.pauses import GiveWay
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes import pass_memory
from shoal.peer.engine.passes.pass_memory import PassBudget
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.passes.pass_workload import PassStreamWork
from shoal.peer.streams.client_stream import ClientStream
from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.codec import decode_frame
from shoal.protocol.messages.passes import Pass, Passed, PassKind, PassPiece, Slot
from shoal.protocol.messages.session import Queued
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype


async def assert_still_serves(peer: Peer) -> None:
    talk = await peer.open(9)
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(5, 1, 3), 9)))
    await talk.stream.close()
    assert peer.service.passes.used_bytes == 0


@with_peer()
async def test_forward_and_backward_are_those_of_the_engine(peer: Peer, engine: Engine) -> None:
    talk = await peer.greet()
    work = PassWork(SPAN, TEXTS, PROMPTS)
    prompts = {"prompt_rows": 1, "prompt_tokens": 3}
    there = await ask(talk, make_pass(**prompts), HIDDEN=TEXTS, PROMPTS=PROMPTS)
    back = await ask(
        talk,
        make_pass(2, kind=PassKind.BACKWARD, **prompts),
        HIDDEN=TEXTS,
        GRADIENTS=GRADIENTS,
        PROMPTS=PROMPTS,
    )

    expected = engine.passes.run_backward(work, GRADIENTS, lambda: None)
    assert expected.prompts_LBPH is not None
    output = engine.passes.run_forward(work, lambda: None)
    assert torch.equal(join(there, Slot.HIDDEN, ROWS, TOKENS, HIDDEN), output)
    assert torch.equal(join(back, Slot.HIDDEN, ROWS, TOKENS, HIDDEN), expected.hidden_BTH)
    assert torch.equal(join(back, Slot.PROMPTS, 2, 1, 3, HIDDEN), expected.prompts_LBPH)
    assert isinstance(there[-1], Passed)
    assert isinstance(back[-1], Passed)
    await assert_still_serves(peer)


@pytest.mark.parametrize("dtype", [WireDtype.BF16, WireDtype.FP16, WireDtype.INT8])
@with_peer()
async def test_answer_is_in_the_dtype_that_was_asked_for(peer: Peer, dtype: WireDtype) -> None:
    talk = await peer.greet()
    first, *_ = await ask(talk, make_pass(dtype=dtype), HIDDEN=TEXTS)
    assert first.tensor.dtype is dtype


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_id": ModelId("b" * 32)}, ErrorCode.WRONG_MODEL),
        ({"span": Span(0, 3)}, ErrorCode.WRONG_SPAN),
        ({"span": Span(1, 4)}, ErrorCode.WRONG_SPAN),
        ({"num_rows": 1, "num_tokens": 513}, ErrorCode.TOO_LONG),
    ],
    ids=str,
)
@with_peer()
async def test_pass_that_cannot_be_is_refused_and_its_pieces_are_passed_over(
    peer: Peer, changes: dict[str, Any], code: ErrorCode
) -> None:
    talk = await peer.greet()
    (refusal,) = await ask(talk, make_pass(**changes), HIDDEN=TEXTS)
    assert assert_declined(refusal, code).session == make_pass().pass_id
    answers = await ask(talk, make_pass(2), HIDDEN=TEXTS)
    assert isinstance(answers[-1], Passed)
    await assert_still_serves(peer)


@pytest.mark.parametrize(
    ("slot", "number"),
    [("HIDDEN", float("nan")), ("GRADIENTS", float("inf")), ("PROMPTS", float("nan"))],
)
@with_peer()
async def test_numbers_that_are_none_are_refused(peer: Peer, slot: str, number: float) -> None:
    talk = await peer.greet()
    asked = make_pass(kind=PassKind.BACKWARD, prompt_rows=1, prompt_tokens=3)
    tensors = {"HIDDEN": TEXTS, "GRADIENTS": GRADIENTS, "PROMPTS": PROMPTS}
    bad = tensors[slot].clone()
    bad.view(-1)[3] = number
    (refusal,) = await ask(talk, asked, **{**tensors, slot: bad})
    assert_declined(refusal, ErrorCode.BAD_VALUES)
    assert isinstance(
        (await ask(talk, replace(asked, pass_id=make_pass(2).pass_id), **tensors))[-1], Passed
    )
    await assert_still_serves(peer)


PIECE = next(cut(make_pass(), Slot.HIDDEN, TEXTS))


@pytest.mark.parametrize(
    "messages",
    [
        [make_pass(), replace(PIECE, slot=Slot.GRADIENTS)],
        [make_pass(), replace(PIECE, offset=1)],
        [make_pass(), make_pass(2)],
        [make_pass(num_rows=1), PIECE],
    ],
    ids=["wrong slot", "wrong place", "two at once", "too many"],
)
@with_peer()
async def test_disorder_ends_the_stream(peer: Peer, messages: list[Any]) -> None:
    talk = await peer.greet()
    await talk.say(*messages)
    refusal = assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
    assert refusal.session is None
    assert await talk.hear() is None
    await assert_still_serves(peer)


@with_peer()
async def test_pieces_of_no_pass_are_passed_over(peer: Peer) -> None:
    talk = await peer.greet()
    of_another = replace(PIECE, pass_id=make_pass(2).pass_id)
    await talk.say(PIECE, make_pass(), of_another, make_pass(2))
    assert "one pass at a time" in assert_declined(await talk.hear(), ErrorCode.BAD_FRAME).detail


@with_peer()
async def test_pass_that_never_comes_is_given_up_and_its_memory_is_free(peer: Peer) -> None:
    talk = await peer.greet()
    await talk.say(make_pass())
    assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)
    await assert_still_serves(peer)


@with_peer()
async def test_stranger_may_ask_for_a_part_of_the_memory_only(peer: Peer) -> None:
    room = peer.service.passes
    num_bytes = 2 * ROWS * TOKENS * HIDDEN * 4
    room.budget_bytes = 4 * num_bytes
    talks = [await peer.greet() for _ in range(3)]
    for number, talk in enumerate(talks, 1):
        await talk.say(make_pass(number))
    refusal = assert_declined(await talks[2].hear(), ErrorCode.BUSY)
    assert refusal.retry_after_seconds
    stranger = await peer.at_host("another").greet()
    await stranger.say(make_pass(4))
    await stranger.say(*cut(make_pass(4), Slot.HIDDEN, TEXTS))
    for talk in talks:
        await talk.stream.close()


@with_peer()
async def test_pass_that_is_more_than_a_peer_takes_is_told_to_be_cut(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_memory, "MOST_TENSOR_BYTES", 1000)

    talk = await peer.greet()
    (refusal,) = await ask(talk, make_pass(), HIDDEN=TEXTS)
    assert "smaller" in assert_declined(refusal, ErrorCode.OUT_OF_MEMORY).detail


@with_peer()
async def test_pass_that_finds_no_memory_is_told_to_be_cut(peer: Peer, engine: Engine) -> None:
    talk = await peer.greet()
    asked = make_pass(kind=PassKind.BACKWARD)
    needed = engine.passes.estimate_bytes(len(SPAN), ROWS, TOKENS, is_backward=True)
    peer.service.read_free_bytes = lambda: needed - 1
    (refusal,) = await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS)
    assert_declined(refusal, ErrorCode.OUT_OF_MEMORY)
    peer.service.read_free_bytes = lambda: needed
    asked = make_pass(2, kind=PassKind.BACKWARD)
    assert isinstance((await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS))[-1], Passed)


@with_peer()
async def test_pass_takes_a_part_of_the_memory_for_training_at_most(
    peer: Peer, engine: Engine
) -> None:
    talk = await peer.greet()
    needed = engine.passes.estimate_bytes(len(SPAN), ROWS, TOKENS, is_backward=False)
    peer.service.pass_budget = PassBudget(needed * 16 // 5 - 16)
    (refusal,) = await ask(talk, make_pass(), HIDDEN=TEXTS)
    assert_declined(refusal, ErrorCode.OUT_OF_MEMORY)
    peer.service.pass_budget = PassBudget(needed * 16 // 5 + 16)
    assert isinstance((await ask(talk, make_pass(2), HIDDEN=TEXTS))[-1], Passed)


@with_peer()
async def test_peer_that_has_no_memory_for_training_says_so(peer: Peer) -> None:
    peer.service.pass_budget = PassBudget(0)
    (refusal,) = await ask(await peer.greet(), make_pass(), HIDDEN=TEXTS)
    assert "no memory for training" in assert_declined(refusal, ErrorCode.OUT_OF_MEMORY).detail


class SlowEngine:
    """An engine, and its passes, which go on until they are dropped, or let go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.passes = self
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.dropped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name, None) or getattr(self._engine.passes, name)

    def run_forward(self, work: PassWork, give_way: GiveWay) -> Tensor:
        self.entered.set()
        try:
            while not self.leave.wait(0.001):
                give_way()
        except BaseException:
            self.dropped.set()
            raise
        return self._engine.passes.run_forward(work, give_way)

    async def wait(self, event: threading.Event) -> None:
        assert await asyncio.to_thread(event.wait, 30)


async def begin_pass(peer: Peer) -> Talk:
    """Return a stream whose pass the engine is about."""
    talk = await peer.greet()
    await talk.say(make_pass(), *cut(make_pass(), Slot.HIDDEN, TEXTS))
    await peer.engine.wait(peer.engine.entered)
    return talk


async def hear_end(talk: Talk) -> None:
    answer = await talk.hear()
    while isinstance(answer, Queued):
        answer = await talk.hear()
    assert isinstance(answer, PassPiece)
    assert isinstance(await talk.hear(), Passed)


@with_peer(wrap=SlowEngine)
async def test_client_that_disappears_has_its_pass_dropped(peer: Peer) -> None:
    talk = await begin_pass(peer)
    assert peer.service.passes.used_bytes > 0
    await talk.stream.close()
    await peer.engine.wait(peer.engine.dropped)
    await assert_still_serves(peer)


@with_peer(wrap=SlowEngine)
async def test_passes_that_are_dropped_while_another_one_runs_leave_nothing(peer: Peer) -> None:
    running = await begin_pass(peer)
    of_one = peer.service.passes.used_bytes
    for number in range(2, 12):
        talk = await peer.greet()
        asked = make_pass(number)
        await talk.say(asked, *cut(asked, Slot.HIDDEN, TEXTS))
        assert isinstance(await talk.hear(), Queued)
        await talk.stream.close()
    while peer.service.passes.used_bytes > of_one:  # noqa: ASYNC110 - the thread lets go of them
        await asyncio.sleep(0.1)
    assert len(peer.compute.passes.jobs) == 0
    peer.engine.leave.set()
    await running.stream.close()


@with_peer(wrap=SlowEngine)
async def test_way_back_is_charged_as_three_ways_there(peer: Peer) -> None:
    there, back = make_pass(2), make_pass(3, kind=PassKind.BACKWARD)
    talk = await begin_pass(peer)
    talks = [await peer.greet() for _ in range(2)]
    await talks[0].say(there, *cut(there, Slot.HIDDEN, TEXTS))
    await talks[1].say(back, *cut(back, Slot.HIDDEN, TEXTS))
    await talks[1].say(*cut(back, Slot.GRADIENTS, GRADIENTS))
    for talk in talks:
        assert isinstance(await talk.hear(), Queued)
    waiting = peer.compute.passes.jobs
    cost = ROWS * TOKENS * len(SPAN)
    assert sorted(job.cost for job in waiting) == [cost, 3 * cost]
    peer.engine.leave.set()


@with_peer(wrap=SlowEngine)
async def test_signs_say_how_long_passes_wait(peer: Peer) -> None:
    peer.engine.leave.set()

    talk = await peer.greet()
    await ask(talk, make_pass(), HIDDEN=TEXTS)  # from now on the speed is known
    peer.engine.leave.clear()
    peer.engine.entered.clear()
    await talk.say(make_pass(2), *cut(make_pass(2), Slot.HIDDEN, TEXTS))
    await peer.engine.wait(peer.engine.entered)
    other = await peer.greet()
    await other.say(make_pass(3), *cut(make_pass(3), Slot.HIDDEN, TEXTS))
    sign = await other.hear()
    assert isinstance(sign, Queued)
    assert sign.wait_seconds > 0
    peer.engine.leave.set()


@with_peer(wrap=SlowEngine)
async def test_pass_that_a_draining_peer_has_taken_comes_to_its_end(peer: Peer) -> None:
    talk = await begin_pass(peer)
    peer.service.begin_draining()
    late = await peer.greet()
    (refusal,) = await ask(late, make_pass(2), HIDDEN=TEXTS)
    assert_declined(refusal, ErrorCode.DRAINING)
    assert not await peer.service.wait_until_empty(10.0)

    peer.engine.leave.set()

    await hear_end(talk)
    assert await peer.service.wait_until_empty(10.0)


@with_peer()
async def test_pass_that_is_on_its_way_for_too_long_is_refused_on_a_stream_that_lives_on(
    peer: Peer,
) -> None:
    talk = await peer.open(9)
    await talk.say(make_pass(num_rows=3 * ROWS))
    refusal = await talk.hear()
    assert "smaller" in assert_declined(refusal, ErrorCode.OUT_OF_MEMORY).detail
    assert peer.service.passes.used_bytes == 0
    await talk.say(*cut(make_pass(), Slot.HIDDEN, TEXTS))  # they were on their way
    assert isinstance((await ask(talk, make_pass(2), HIDDEN=TEXTS))[-1], Passed)
    await talk.stream.close()


class SlowReader:
    """A stream whose other end takes one frame each time it is told to."""

    remote_host = "home"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._may_take = asyncio.Semaphore(0)

    async def send(self, frame: bytes) -> None:
        await self._may_take.acquire()
        self.sent.append(decode_frame(frame))

    def set_gate(self, gate: object) -> None:
        return

    async def take(self, num_frames: int) -> None:
        num_expected = len(self.sent) + num_frames
        for _ in range(num_frames):
            self._may_take.release()
        while len(self.sent) < num_expected:  # noqa: ASYNC110 - a test on virtual time
            await asyncio.sleep(0.01)


@with_peer()
async def test_answer_that_nobody_reads_counts_as_a_pass_and_not_against_steps(peer: Peer) -> None:
    service, reader, asked = peer.service, SlowReader(), make_pass()
    stream: Any = reader
    client = ClientStream(service.host, stream, (), lambda _: None)
    answers, passes = client.answers, PassStreamWork(service.training, client)
    take: Any = passes.handlers
    take[Pass](asked)
    for piece in cut(asked, Slot.HIDDEN, TEXTS):
        take[PassPiece](piece)
    sending = asyncio.create_task(answers.run())
    await reader.take(1)
    while service.passes.used_bytes == 2 * TEXTS.nbytes:  # noqa: ASYNC110 - computed by a thread
        await asyncio.sleep(0)  # which takes no time here: nobody reads the answer meanwhile
    assert TEXTS.nbytes < service.passes.used_bytes < 2 * TEXTS.nbytes
    assert (service.pending.used_bytes, service.num_passes) == (0, 1)

    while not isinstance(reader.sent[-1], PassPiece):
        await reader.take(1)
    assert (service.passes.used_bytes, service.num_passes) == (0, 0)
    take[Pass](make_pass(2))  # the last word may not have been sent
    passes.end()
    await reader.take(1)
    assert isinstance(reader.sent[-1], Passed)
    answers.finish()
    await sending


@with_peer(wrap=SlowEngine)
async def test_sessions_go_on_and_the_client_hears_every_second_that_its_pass_does(
    peer: Peer,
) -> None:
    talk = await begin_pass(peer)
    signs = [await talk.hear() for _ in range(45)]
    assert all(isinstance(sign, Queued) for sign in signs)
    other = await peer.open(9)
    expect_output(await other.ask(make_step(1, 0, draw_hidden(5, 1, 3), 9)))
    peer.engine.leave.set()
    await hear_end(talk)
    await other.stream.close()


@with_peer()
async def test_largest_pass_is_counted_before_anything_of_it_comes(peer: Peer) -> None:
    """A stranger may say anything; nothing is allocated for it."""

    talk = await peer.greet()
    asked = make_pass(
        kind=PassKind.BACKWARD, num_rows=limits.MAX_BATCH_ROWS, num_tokens=64,
        prompt_rows=limits.MAX_BATCH_ROWS, prompt_tokens=64,
    )  # fmt: skip
    await talk.say(asked)
    await talk.wait_until_read()
    assert peer.service.passes.used_bytes == (3 + 2 * len(SPAN)) * 16384 * HIDDEN * 4
    await talk.stream.close()
