"""Whose fault a failed step is: the peer's, the caller's, or nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from session_scene import (
    WIDTH,
    Answer,
    FakePeer,
    Mischief,
    Oracle,
    SessionScene,
    add_two_rows_of_peers,
    be_honest,
    decline_when,
    draw,
    in_scene,
    now,
)
from torch import Tensor

from shoal.client.session.hop_link import from_wire, to_wire
from shoal.protocol.errors import ErrorCode, RefusedError, UsageError
from shoal.protocol.ids import SessionId
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Declined, Gap, Open, Opened, Step

OTHER_SESSION = SessionId(b"x" * 16)

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
    "other session": lambda _, answer: replace(answer, session=OTHER_SESSION),
    "other sequence": lambda _, answer: replace(answer, sequence=answer.sequence + 1),
    "other dtype": lambda _, answer: replace(
        answer, hidden=to_wire(from_wire(answer.hidden), type(answer.hidden.dtype).BF16)
    ),
    "garbage": lambda _, answer: b"\xff" * 100,
    "cut": lambda _, answer: encode_frame(answer)[:-3],
    "welcome": lambda _, answer: Opened(answer.session, 1, 0.0, 0),
    "gap": lambda step, _: Gap(step.session, step.epoch, step.sequence, 0),
    "declines another": lambda step, _: Declined(
        OTHER_SESSION, step.sequence, ErrorCode.BUSY, "no"
    ),
    "declines the stream": lambda *_: Declined(None, 0, ErrorCode.INTERNAL, "no"),
    "internal": lambda step, _: Declined(step.session, step.sequence, ErrorCode.INTERNAL, "oh"),
    "hangs up": lambda step, _: None,
}


@pytest.mark.parametrize("name", MISCHIEF)
@in_scene()
async def test_peer_that_misbehaves_is_replaced_and_avoided(scene: SessionScene, name: str) -> None:
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


@in_scene()
async def test_peer_that_goes_on_answering_unasked_is_replaced_and_avoided(
    scene: SessionScene,
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    for index in range(2):
        assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))
    villain = scene.peer_of(session, 1)
    villain.num_repeats = 200
    for index in range(2, 9):
        assert torch.equal(await session.step(draw(index)), oracle.step(draw(index)))
        await asyncio.sleep(0.1)

    assert scene.quarantined == [villain.name]
    assert villain.name not in scene.names_of(session)


@in_scene()
async def test_peer_that_misbehaves_during_a_replay_is_replaced_as_well(
    scene: SessionScene,
) -> None:
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
@in_scene()
async def test_callers_mistake_is_a_usage_error_and_nobody_else_is_blamed(
    scene: SessionScene, hidden: Tensor, row_map: tuple[int, ...] | None
) -> None:
    await add_two_rows_of_peers(scene)
    session, oracle = scene.open_session(), Oracle()
    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))

    with pytest.raises(UsageError):
        await session.step(hidden, row_map)

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))
    assert (session.failovers, scene.quarantined) == ([], [])


@in_scene()
async def test_too_many_rows_are_a_usage_error(scene: SessionScene) -> None:
    with pytest.raises(UsageError, match="256 rows"):
        await scene.open_session().step(torch.zeros(257, 1, WIDTH))


@pytest.mark.parametrize("code", [ErrorCode.BAD_VALUES, ErrorCode.TOO_LONG, ErrorCode.BAD_FRAME])
@pytest.mark.parametrize("kind", [Open, Step])
@in_scene()
async def test_refusal_of_the_question_goes_to_the_caller_and_nobody_is_blamed(
    scene: SessionScene, kind: type[Open] | type[Step], code: ErrorCode
) -> None:
    for name in ("a", "b"):
        (await scene.add(name, 0, 6)).mischief = decline_when(
            lambda message: isinstance(message, kind), code, None
        )
    session = scene.open_session()

    with pytest.raises(RefusedError, match="not now") as caught:
        await session.step(draw(1, 3))

    assert caught.value.code is code
    assert scene.quarantined == []
    for peer in scene.peers.values():
        peer.mischief = be_honest
    assert torch.equal(await session.step(draw(1, 3)), Oracle().step(draw(1, 3)))


@pytest.mark.parametrize("kind", [Open, Step])
@in_scene()
async def test_one_peer_that_blames_the_question_is_not_believed(
    scene: SessionScene, kind: type[Message]
) -> None:
    liar = await scene.add("liar", 0, 6, decode_steps_per_second=1e6)
    await scene.add("honest", 0, 6)
    session, oracle = scene.open_session(), Oracle()
    if kind is Step:
        assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))
        assert scene.names_of(session) == ["liar"]
    liar.mischief = decline_when(
        lambda message: isinstance(message, kind), ErrorCode.BAD_VALUES, None
    )

    assert torch.equal(await session.step(draw(2)), oracle.step(draw(2)))

    assert scene.names_of(session) == ["honest"]
    assert scene.quarantined == (["liar"] if kind is Step else [])
    assert now() < 1


@in_scene()
async def test_crowd_that_blames_the_question_is_not_believed_either_and_avoided_from_then_on(
    scene: SessionScene,
) -> None:
    crowd = [f"liar{number}" for number in range(5)]
    for name in crowd:
        liar = await scene.add(name, 0, 6, decode_steps_per_second=1e6)
        liar.mischief = decline_when(
            lambda message: isinstance(message, Step), ErrorCode.BAD_VALUES, None
        )
    await scene.add("honest", 0, 6)
    session, oracle = scene.open_session(), Oracle()

    assert torch.equal(await session.step(draw(1, 3)), oracle.step(draw(1, 3)))

    assert scene.names_of(session) == ["honest"]
    assert now() < 5
    asked = [name for name in crowd if scene.peers[name].steps]
    assert len(asked) > 1
    assert scene.quarantined == asked
    for index in range(3):
        session, oracle = scene.open_session(secret=SessionId(bytes([index]) * 16)), Oracle()
        assert torch.equal(await session.step(draw(2, 3)), oracle.step(draw(2, 3)))
    assert [name for name in crowd if len(scene.peers[name].steps) > 1] == []


@pytest.mark.parametrize("kind", [Open, Step])
@in_scene()
async def test_only_peer_that_blames_the_question_is_believed_at_once(
    scene: SessionScene, kind: type[Message]
) -> None:
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
