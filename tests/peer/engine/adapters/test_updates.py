"""Adapters that a peer trains, on a stream: repeats do nothing, strangers nothing, NaN nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from adapter_talk import ALICE, BOB, bring, draw_matrices, greet, keep, pack
from pass_scene import check_close
from pass_talk import GRADIENTS, ROWS, TEXTS, ask, make_pass
from service_scene import HELLO, PatientStream, Peer, Talk, assert_declined, with_peer
from torch import Tensor
from virtual_time import VirtualClock

from shoal.peer.engine.adapters.adapter import Adapter, AdapterPart
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.peer.engine.adapters.adapter_store import AdapterStore
from shoal.peer.engine.adapters.trained_adapter import AccumulatedGradients, TrainedAdapter
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.ids import AdapterId, PassId, SessionId
from shoal.protocol.messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterUpdate,
    GradientSum,
    OptimizerKind,
    OptimizerSettings,
    make_updated_id,
)
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.passes import AccumulationOrder, AdapterRows, Passed, PassKind
from shoal.protocol.messages.session import Queued
from shoal.protocol.versions import MAX_VERSION

ADAMW = OptimizerSettings(OptimizerKind.ADAMW, 0.01, 0.1, 0.0, 0.9, 0.99, 1e-8)
SGD = OptimizerSettings(OptimizerKind.SGD, 0.1, 0.01, 0.9)
TRAINED = {"optimizer": OptimizerKind.ADAMW}


def make_id(number: int) -> PassId:
    return PassId(SessionId(bytes([number]) * 16))


async def accumulate(
    talk: Talk, name: AdapterId, number: int, part: int, scale: float = 1.0
) -> Any:
    """Go back through blocks; return the last answer."""
    asked = make_pass(
        part,
        kind=PassKind.BACKWARD,
        adapters=(AdapterRows(name, ROWS),),
        accumulate=AccumulationOrder(number, part, scale),
    )
    with VirtualClock().hold():  # it takes no time
        return (await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS))[-1]


async def say(talk: Talk, message: Any) -> Any:
    """Return the answer to something, without the signs of life."""
    with VirtualClock().hold():
        await talk.say(message)
        while isinstance(answer := await talk.hear(), Queued):
            pass
    return answer


async def measure(talk: Talk, name: AdapterId, number: int, *parts: int) -> Any:
    return await say(talk, AdapterMeasure(make_id(99), GradientSum(name, number, parts)))


async def fetch(talk: Talk, name: AdapterId) -> tuple[AdapterHead, list[dict[str, Tensor]]]:
    head = await say(talk, AdapterFetch(make_id(98), name))
    assert isinstance(head, AdapterHead)
    data = b""
    while len(data) < head.num_bytes:
        piece = await talk.hear()
        assert isinstance(piece, AdapterPiece)
        data += piece.data
    size = len(data) // head.num_files
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return head, [safetensors.torch.load(part) for part in parts]


def compute_gradients(engine: Engine, times: int = 1) -> dict[str, Tensor]:
    adapter = read_adapter(*pack(), engine.spec, engine.span)
    work = PassWork(engine.span, TEXTS, adapters=(adapter,) * ROWS)
    (found,) = engine.passes.run_backward(work, GRADIENTS, lambda: None).adapters.values()
    return {name: times * gradient for name, gradient in found.items()}


@with_peer()
async def test_gradients_are_added_once_however_often_they_are_asked_for(
    peer: Peer, engine: Engine
) -> None:
    expected = sum(float(x.square().sum()) for x in compute_gradients(engine, 2).values())

    talk = await greet(peer)
    name = await keep(talk, pack(), **TRAINED)
    for part, scale in ((1, 1.5), (2, 0.5), (1, 1.5), (2, 0.5)):
        assert isinstance(await accumulate(talk, name, 1, part, scale), Passed)
    measured = await measure(talk, name, 1, 1, 2)
    assert isinstance(measured, AdapterMeasured)
    assert measured.square_sum == pytest.approx(expected, rel=1e-5)
    for number, parts in ((1, (1,)), (1, (1, 2, 3)), (2, (1, 2))):
        answer = await measure(talk, name, number, *parts)
        assert_declined(answer, ErrorCode.UNKNOWN_ADAPTER)
    assert isinstance(await accumulate(talk, name, 2, 3), Passed)  # which forgets the first sum
    assert_declined(await accumulate(talk, name, 1, 4), ErrorCode.UNKNOWN_ADAPTER)
    assert isinstance(await measure(talk, name, 2, 3), AdapterMeasured)


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
@with_peer()
async def test_update_is_that_of_torch_and_is_made_once(
    peer: Peer, engine: Engine, settings: OptimizerSettings
) -> None:
    matrices = {name: x.clone().requires_grad_() for name, x in draw_matrices().items()}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        matrices.values(), lr=0.1, weight_decay=0.01, momentum=0.9
    )
    if settings is ADAMW:
        optimizer = torch.optim.AdamW(
            matrices.values(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.99)
        )
    for name, gradient in compute_gradients(engine).items():
        matrices[name].grad = 0.5 * gradient
    optimizer.step()

    talk = await greet(peer)
    name = await keep(talk, pack(), optimizer=settings.kind)
    held = peer.service.adapters.shared.used_bytes
    await accumulate(talk, name, 1, 7)
    asked = AdapterUpdate(make_id(90), GradientSum(name, 1, (7,)), settings, 0.5)
    new = make_updated_id(asked)
    assert isinstance(await say(talk, asked), AdapterKept)
    again = await greet(peer)  # the answer was lost
    assert isinstance(await say(again, replace(asked, pass_id=make_id(91))), AdapterKept)

    head, files = await fetch(again, new)
    assert (head.optimizer, head.num_updates) == (settings.kind, 1)
    assert len(files) == 1 + settings.kind.num_moments
    for found, matrix in matrices.items():
        check_close(files[0][found], matrix.detach())
    assert len(peer.service.adapters) == 1
    assert peer.service.adapters.shared.used_bytes == held
    assert_declined(await accumulate(talk, name, 1, 8), ErrorCode.UNKNOWN_ADAPTER)
    assert isinstance(await accumulate(talk, new, 1, 8), Passed)

    # Brought to another peer as it is, it goes on where it was.
    data = b"".join(safetensors.torch.save(file) for file in files)
    changes = {"optimizer": settings.kind, "num_updates": 1, "number": 5}
    other = await keep(again, (pack()[0], data), **changes)
    assert len((await fetch(again, other))[1]) == len(files)


@with_peer()
async def test_nobody_else_trains_an_adapter_or_sees_it(peer: Peer) -> None:
    anna, bert = await greet(peer), await greet(peer, BOB)
    name = await keep(anna, pack(), **TRAINED)
    plain = await keep(anna, pack(draw_matrices(2)), number=2)
    public = await keep(anna, pack(draw_matrices(3)), number=3, is_published=True)
    await accumulate(anna, name, 1, 1)
    gradients = GradientSum(name, 1, (1,))
    for message in (
        AdapterMeasure(make_id(1), gradients),
        AdapterUpdate(make_id(1), gradients, ADAMW),
        AdapterFetch(make_id(1), name),
    ):
        assert_declined(await say(bert, message), ErrorCode.UNKNOWN_ADAPTER)
    assert_declined(await accumulate(bert, name, 1, 2), ErrorCode.UNKNOWN_ADAPTER)
    for untrained in (plain, public):
        answer = await accumulate(anna, untrained, 1, 3)
        assert "not asked to train" in assert_declined(answer, ErrorCode.BAD_VALUES).detail
        asked = AdapterUpdate(make_id(1), GradientSum(untrained, 1), ADAMW)
        assert_declined(await say(anna, asked), ErrorCode.BAD_VALUES)
        asked = AdapterFetch(make_id(1), untrained)
        assert_declined(await say(anna, asked), ErrorCode.BAD_VALUES)
    answer = await say(anna, AdapterUpdate(make_id(1), gradients, SGD))
    assert "trained by ADAMW" in assert_declined(answer, ErrorCode.BAD_VALUES).detail
    assert isinstance(await measure(anna, name, 1, 1), AdapterMeasured)


@with_peer()
async def test_moments_and_gradients_count_with_the_adapter(peer: Peer) -> None:
    config, tensors = pack()

    talk = await greet(peer)
    await keep(talk, pack(), **TRAINED)
    assert peer.service.adapters.shared.used_bytes == len(config) + 4 * len(tensors)
    peer.service.adapters = AdapterStore(peer.service.clock, 4 * len(tensors))
    files = pack(draw_matrices(2))
    answer = await bring(talk, files, number=2, **TRAINED)
    assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert peer.service.adapters.shared.used_bytes == 0


@with_peer()
async def test_files_that_no_optimizer_has_written_are_refused(peer: Peer) -> None:
    config, tensors = pack()
    negative = safetensors.torch.save(
        {name: -torch.ones_like(x) for name, x in draw_matrices().items()}
    )
    halves = safetensors.torch.save({name: x.half() for name, x in draw_matrices().items()})
    fewer = safetensors.torch.save(draw_matrices(1, (1,)))

    talk = await greet(peer)
    for data in (3 * halves, tensors + tensors + negative, tensors + bytes(2 * len(tensors))):
        answer = await bring(talk, (config, data), num_updates=1, **TRAINED)
        assert_declined(answer, ErrorCode.BAD_VALUES)
    padded = tensors + (fewer + bytes(len(tensors) - len(fewer))) * 2
    answer = await bring(talk, (config, padded), num_updates=1, **TRAINED)
    assert_declined(answer, ErrorCode.BAD_VALUES)
    assert len(peer.service.adapters) == 0
    assert peer.service.adapters.shared.used_bytes == 0


@with_peer()
async def test_client_that_goes_in_the_middle_leaves_the_adapter_as_it_was(peer: Peer) -> None:
    talk = await greet(peer)
    name = await keep(talk, pack(), **TRAINED)
    await accumulate(talk, name, 1, 1)
    asked = AdapterUpdate(make_id(90), GradientSum(name, 1, (1,)), ADAMW)
    await talk.say(asked)
    await talk.stream.close()
    again = await greet(peer)
    assert isinstance(await say(again, replace(asked, pass_id=make_id(91))), AdapterKept)
    assert peer.service.num_passes == 0


class WaitingReader(PatientStream):
    """A stream whose other end reads nothing before it is told to."""

    remote_host = "client"

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Queue[bytes | None]()
        self.reads = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        await self.reads.wait()

    async def receive(self) -> bytes | None:
        return await self.asked.get()


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
@with_peer()
async def test_answers_count_until_they_are_read_or_the_stream_is_over(
    peer: Peer, is_read: bool
) -> None:
    service, stream = peer.service, WaitingReader()
    name = await keep(await greet(peer), pack(), **TRAINED)
    hello = replace(HELLO, max_version=MAX_VERSION, client=ALICE)
    stream.asked.put_nowait(encode_frame(hello))
    serving = asyncio.create_task(service.serve(stream))
    for number in (1, 2, 3):
        before = service.passes.used_bytes
        stream.asked.put_nowait(encode_frame(AdapterFetch(make_id(number), name)))
        while service.passes.used_bytes == before or service.num_passes:  # noqa: ASYNC110
            await asyncio.sleep(0)  # a thread computes the answer meanwhile
    if is_read:
        stream.reads.set()
    stream.asked.put_nowait(None)
    await serving
    assert service.passes.used_bytes == 0


@with_peer()
async def test_answer_that_cannot_be_made_does_not_count(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_matrices(*_: object) -> list[dict[str, Tensor]]:
        raise ValueError("a bug")

    talk = await greet(peer)
    name = await keep(talk, pack(), **TRAINED)
    monkeypatch.setattr(TrainedAdapter, "copy_matrices", copy_matrices)

    answer = await say(talk, AdapterFetch(make_id(98), name))

    assert_declined(answer, ErrorCode.INTERNAL)
    assert peer.service.passes.used_bytes == 0


# ---- without a stream


def make_trained(engine: Engine) -> TrainedAdapter:
    return TrainedAdapter.begin(
        [read_adapter(*pack(), engine.spec, engine.span)], OptimizerKind.ADAMW, 0
    )


def no_pause() -> None:
    """Do not give way."""


def test_sum_with_a_part_that_was_broken_off_is_not_used() -> None:
    accumulated, num_calls = AccumulatedGradients(), 0

    def break_off() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:  # two matrices are looked at, and then one is added
            raise InterruptedError

    gradients = {"a": torch.ones(3), "b": torch.ones(3)}
    accumulated.add(AccumulationOrder(1, 1), gradients, no_pause)
    with pytest.raises(InterruptedError):
        accumulated.add(AccumulationOrder(1, 2), gradients, break_off)
    with pytest.raises(RefusedError) as refusal:
        accumulated.take(GradientSum(AdapterId(b""), 1, (1,)))
    assert refusal.value.code is ErrorCode.UNKNOWN_ADAPTER
    accumulated.add(AccumulationOrder(2, 3), gradients, no_pause)
    assert accumulated.sum_squares(GradientSum(AdapterId(b""), 2, (3,)), no_pause) == 6.0


def test_gradients_that_are_not_finite_are_named_and_none_is_added() -> None:
    accumulated = AccumulatedGradients()
    accumulated.add(AccumulationOrder(1, 1), {"a": torch.ones(3)}, no_pause)
    for wrong in (float("nan"), float("inf")):
        broken = {"a": torch.ones(3), "b": torch.tensor([1.0, wrong])}
        with pytest.raises(RefusedError, match="gradients of b are not finite") as refusal:
            accumulated.add(AccumulationOrder(1, 2), broken, no_pause)
        assert refusal.value.code is ErrorCode.BAD_VALUES
    assert accumulated.sum_squares(GradientSum(AdapterId(b""), 1, (1,)), no_pause) == 3.0
    huge = {"a": torch.full((3,), 1e30)}
    accumulated.add(AccumulationOrder(2, 3), huge, no_pause)
    with pytest.raises(RefusedError, match="not finite"):
        accumulated.sum_squares(GradientSum(AdapterId(b""), 2, (3,)), no_pause)


def test_update_that_leads_to_infinity_changes_nothing(engine: Engine) -> None:
    trained = make_trained(engine)
    gradients = {name: torch.full_like(x, 1e18) for name, x in draw_matrices().items()}
    trained.accumulated.add(AccumulationOrder(1, 1), gradients, no_pause)
    asked = GradientSum(AdapterId(b""), 1, (1,))
    settings = replace(ADAMW, learning_rate=100.0, weight_decay=100.0)
    before = trained.copy_matrices(no_pause)

    def learn() -> None:
        current = trained
        for _ in range(20):
            current = current.update(asked, settings, 1.0, no_pause)
            current.accumulated.add(AccumulationOrder(1, 1), gradients, no_pause)

    with pytest.raises(RefusedError, match="would no longer be finite; lower"):
        learn()
    for name, matrix in trained.copy_matrices(no_pause)[0].items():
        assert torch.equal(matrix, before[0][name])


def test_update_gives_way_every_quarter_of_a_million_numbers() -> None:
    part = AdapterPart("q", slice(0, 8), torch.zeros(8, 2**18), torch.zeros(8, 8), 1.0, None)
    trained = TrainedAdapter.begin([Adapter(8, {(0, "q"): (part,)})], OptimizerKind.SGD, 0)
    pauses: list[int] = []
    trained.update(GradientSum(AdapterId(b""), 1), SGD, 1.0, lambda: pauses.append(1))
    assert len(pauses) == 9
