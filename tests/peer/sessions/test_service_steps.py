"""Steps of sessions on a peer's streams, driven by hand: computed, refused, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from service_scene import (
    HIDDEN,
    SPAN,
    Peer,
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

from shoal.peer.engine.engine import Engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ErrorCode
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Close, Declined, Gap, Opened, Output, Step
from shoal.protocol.tensors import WireDtype


@with_peer()
async def test_steps_compute_what_the_engine_computes(peer: Peer, engine: Engine) -> None:
    prompt, token = draw_hidden(1, 2, 5), draw_hidden(2, 2, 1)
    expected = compute_alone(engine, prompt, token)

    talk = await peer.open(num_rows=2)

    outputs = [
        expect_output(await talk.ask(make_step(1, 0, prompt))),
        expect_output(await talk.ask(make_step(2, 5, token))),
    ]

    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


@with_peer()
async def test_options_of_a_step_reach_the_engine(peer: Peer, engine: Engine) -> None:
    prompt, token = draw_hidden(1, 2, 5), draw_hidden(2, 2, 1)
    cache = engine.pool.open(2, 100, SPAN)
    engine.execute([StepWork(cache, 0, prompt)])
    (wanted,) = engine.execute([StepWork(cache, 5, token, row_map=(1, 1), decoded=True)])
    cache.close()

    talk = await peer.open(num_rows=2, dtype=WireDtype.BF16)
    last = make_step(1, 0, prompt, last_token_only=True)

    answer = await talk.ask(last)
    assert expect_output(answer).shape == (2, 1, HIDDEN)
    answer = await talk.ask(make_step(2, 5, token, row_map=(1, 1), is_decoded=True))

    output = expect_output(answer)
    assert output.dtype == torch.bfloat16
    assert isinstance(wanted, Tensor)
    assert torch.equal(output, wanted.to(torch.bfloat16))


@with_peer()
async def test_session_table_on_the_wire(peer: Peer, engine: Engine) -> None:
    tokens = [draw_hidden(seed) for seed in range(4)]
    expected = compute_alone(engine, tokens[0], tokens[1], tokens[3])

    talk = await peer.open(epoch=5)

    async def ask(step: Step, epoch: int = 5) -> Message | None:
        return await talk.ask(replace(step, epoch=epoch))

    first = await ask(make_step(1, 0, tokens[0]))
    second = await ask(make_step(2, 1, tokens[1]))
    beyond = await ask(make_step(3, 7, tokens[2]))
    again = await ask(make_step(2, 1, tokens[1]))
    await ask(make_step(4, 2, tokens[2]))
    # Two that are dropped without a word, then one that rolls back in a newer epoch.
    await talk.say(replace(make_step(5, 3, tokens[2]), epoch=4))
    await talk.say(replace(make_step(1, 0, tokens[2]), epoch=5))
    back = await ask(make_step(6, 2, tokens[3]), epoch=6)

    assert beyond == Gap(make_session(1), 5, 3, 2)
    assert again == second
    for answer, wanted in zip((first, second, back), expected, strict=True):
        assert torch.equal(expect_output(answer), wanted)
    assert isinstance(back, Output)
    assert (back.epoch, back.sequence, back.position) == (6, 6, 2)


@with_peer()
async def test_answers_keep_the_order_of_the_questions(peer: Peer) -> None:
    talk = await peer.open(1)
    assert isinstance(await talk.ask(make_open(2)), Opened)

    await talk.say(
        make_step(1, 0, draw_hidden(1, 1, 50), number=1),
        make_step(9, 4, draw_hidden(2), number=2),
        make_step(1, 0, draw_hidden(3), number=2),
        make_step(2, 50, draw_hidden(4), number=1),
        make_step(1, 0, draw_hidden(5), number=3),
    )
    answers = [await talk.hear() for _ in range(5)]

    kinds = [type(answer) for answer in answers]
    assert kinds == [Output, Gap, Output, Output, Declined]
    assert [getattr(answer, "sequence", None) for answer in answers] == [1, 9, 1, 2, 1]


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (make_step(1, 0, draw_hidden(1, width=HIDDEN + 1)), ErrorCode.BAD_VALUES),
        (make_step(1, 0, draw_hidden(1, width=1)), ErrorCode.BAD_VALUES),
        (make_step(1, 0, torch.full((1, 1, HIDDEN), float("nan"))), ErrorCode.BAD_VALUES),
        (make_step(1, 0, torch.full((1, 1, HIDDEN), float("-inf"))), ErrorCode.BAD_VALUES),
        (make_step(1, 0, draw_hidden(1, num_rows=2)), ErrorCode.BAD_FRAME),
        (make_step(1, 0, draw_hidden(1, num_tokens=101)), ErrorCode.TOO_LONG),
        (make_step(1, 0, draw_hidden(1), number=2), ErrorCode.UNKNOWN_SESSION),
    ],
    ids=["wide", "narrow", "nan", "infinity", "rows", "length", "unknown"],
)
@with_peer()
async def test_bad_step_is_refused_and_changes_nothing(
    peer: Peer, engine: Engine, step: Step, code: ErrorCode
) -> None:
    good = draw_hidden(2, 1, 3)
    (wanted,) = compute_alone(engine, good)

    talk = await peer.open()

    refusal = assert_declined(await talk.ask(step), code)
    output = expect_output(await talk.ask(make_step(2, 0, good)))

    assert (refusal.session, refusal.sequence) == (step.session, step.sequence)
    assert torch.equal(output, wanted)


@with_peer()
async def test_step_behind_a_refused_one_is_refused_as_well(peer: Peer) -> None:
    talk = await peer.open()

    await talk.say(
        make_step(1, 0, torch.full((1, 3, HIDDEN), float("nan"))), make_step(2, 3, draw_hidden(1))
    )

    assert_declined(await talk.hear(), ErrorCode.BAD_VALUES)
    assert isinstance(await talk.hear(), Declined | Gap)
    gap = await talk.ask(make_step(3, 3, draw_hidden(1)))
    assert isinstance(gap, Gap)
    assert gap.length == 0
    expect_output(await talk.ask(make_step(4, 0, draw_hidden(1))))


@with_peer()
async def test_step_behind_a_refused_rollback_is_not_computed_on_the_old_tokens(peer: Peer) -> None:
    talk = await peer.open()
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, 1, 10))))

    await talk.say(
        make_step(2, 5, torch.full((1, 1, HIDDEN), float("nan"))), make_step(3, 6, draw_hidden(2))
    )

    assert_declined(await talk.hear(), ErrorCode.BAD_VALUES)
    assert isinstance(await talk.hear(), Declined | Gap)
    held = peer.service.sessions[make_session(1)]
    assert held.state.length == held.cache.length == 5


@with_peer()
async def test_second_stream_may_step_a_session_and_its_end_leaves_it(
    peer: Peer, engine: Engine
) -> None:
    parts = [draw_hidden(seed, 1, 4) for seed in range(3)]
    expected = compute_alone(engine, *parts)

    interactive, bulk = await peer.open(), await peer.greet()

    outputs = [
        expect_output(await talk.ask(make_step(index + 1, 4 * index, parts[index])))
        for index, talk in enumerate((interactive, bulk))
    ]
    await bulk.say(Close(make_session(1), 1))  # not its own: nothing happens
    await bulk.stream.close()
    outputs.append(expect_output(await interactive.ask(make_step(3, 8, parts[2]))))

    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


@with_peer()
async def test_bulk_stream_is_told_when_the_session_is_gone(peer: Peer) -> None:
    interactive, bulk = await peer.open(), await peer.greet()
    await interactive.stream.close()
    await peer.wait_until_empty()

    answer = await bulk.ask(make_step(1, 0, draw_hidden(1)))

    assert_declined(answer, ErrorCode.UNKNOWN_SESSION)
