"""Adapters that are uploaded: kept and shared fairly, refused by name, let go."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapter_talk import (
    ALICE,
    BOB,
    CONFIG,
    RANK,
    bring,
    draw_matrices,
    greet,
    keep,
    make_head,
    pack,
)
from pass_scene import check_close
from pass_talk import GRADIENTS, ROWS, TEXTS, TOKENS, ask, cut, join, make_pass
from service_scene import HELLO, HIDDEN, SPAN, Peer, Talk, assert_declined, draw_hidden, with_peer
from virtual_time import VirtualClock

from shoal.peer.engine.adapters.adapter import Adapter, AdapterPart
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.peer.engine.adapters.adapter_store import AdapterStore
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes import pass_memory
from shoal.peer.engine.passes.pass_memory import PassBudget
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.passes import uploads
from shoal.peer.passes.uploads import UploadStreamWork
from shoal.peer.passes.wire_passes import WireWork, count_cost
from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import NO_ADAPTER, AdapterId, UploadId
from shoal.protocol.messages.adapters import (
    KEEP_SECONDS,
    AdapterKept,
    AdapterWithdrawal,
    OptimizerKind,
    cut_adapter,
)
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.passes import AdapterRows, Passed, PassKind, PassPiece, Slot
from shoal.protocol.messages.session import Declined, Queued
from shoal.protocol.tensors import WireDtype
from shoal.protocol.versions import OPTIMIZER_VERSION, PASS_VERSION


async def run_forward(talk: Talk, name: AdapterId, number: int = 1) -> Any:
    """Ask for a pass whose rows have an adapter, which takes no time; return the last answer."""
    asked = make_pass(number, adapters=(AdapterRows(name, ROWS),))
    with VirtualClock().hold():
        return (await ask(talk, asked, HIDDEN=TEXTS))[-1]


def read(engine: Engine, files: tuple[bytes, bytes]) -> Any:
    return read_adapter(*files, engine.spec, engine.span).cut(SPAN)


@with_peer()
async def test_rows_have_their_adapters_and_gradients_come_back(peer: Peer, engine: Engine) -> None:
    files = pack(), pack(draw_matrices(2))

    talk = await greet(peer)
    one, other = [await keep(talk, pair, number=n) for n, pair in enumerate(files)]
    rows = (AdapterRows(other, 1), AdapterRows(NO_ADAPTER, 2), AdapterRows(one, 2))
    texts, grads = draw_hidden(4, 5, TOKENS), draw_hidden(5, 5, TOKENS)
    mine = [read(engine, pair) for pair in files]
    work = PassWork(SPAN, texts, adapters=(mine[1], None, None, mine[0], mine[0]))
    numbers = 2 * 2 * 2 * RANK * HIDDEN
    asked = make_pass(num_rows=5, adapters=rows, adapter_vectors=numbers // HIDDEN)
    there = await ask(talk, replace(asked, adapter_vectors=0), HIDDEN=texts)
    back = await ask(talk, replace(asked, kind=PassKind.BACKWARD), HIDDEN=texts, GRADIENTS=grads)

    output = engine.passes.run_forward(work, lambda: None)
    expected = engine.passes.run_backward(work, grads, lambda: None)
    check_close(join(there, Slot.HIDDEN, 5, TOKENS, HIDDEN), output)
    check_close(join(back, Slot.HIDDEN, 5, TOKENS, HIDDEN), expected.hidden_BTH)
    flat = [
        expected.adapters[adapter][name].reshape(-1)
        for adapter in (mine[1], mine[0])
        for name in sorted(expected.adapters[adapter])
    ]
    check_close(join(back, Slot.ADAPTERS, numbers), torch.cat(flat))


@with_peer()
async def test_gradients_that_nobody_wants_are_not_answered(peer: Peer, engine: Engine) -> None:
    talk = await greet(peer)
    rows = (AdapterRows(await keep(talk, pack()), ROWS),)
    asked = make_pass(kind=PassKind.BACKWARD, adapters=rows)
    answers = await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS)

    work = PassWork(SPAN, TEXTS, adapters=(read(engine, pack()),) * ROWS)
    expected = engine.passes.run_backward(work, GRADIENTS, lambda: None)
    found = join(answers, Slot.HIDDEN, ROWS, TOKENS, HIDDEN)
    check_close(found, expected.hidden_BTH)
    assert {one.slot for one in answers[:-1]} == {Slot.HIDDEN}


@pytest.mark.parametrize("dtype", [WireDtype.FP16, WireDtype.INT8])
@with_peer()
async def test_gradients_keep_their_range(peer: Peer, dtype: WireDtype) -> None:
    talk = await greet(peer)
    rows = (AdapterRows(await keep(talk, pack()), ROWS),)
    vectors = 4 * RANK
    asked = make_pass(kind=PassKind.BACKWARD, adapters=rows, adapter_vectors=vectors, dtype=dtype)
    *_, piece, end = await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS)
    assert isinstance(end, Passed)
    assert (piece.slot, piece.tensor.dtype) == (Slot.ADAPTERS, WireDtype.BF16)


@pytest.mark.parametrize("vectors", [1, 4 * RANK - 1, 4 * RANK + 1, limits.MAX_PASS_ADAPTERS])
@with_peer()
async def test_gradients_of_another_size_are_not_computed(peer: Peer, vectors: int) -> None:
    talk = await greet(peer)
    rows = (AdapterRows(await keep(talk, pack()), ROWS),)
    asked = make_pass(kind=PassKind.BACKWARD, adapters=rows, adapter_vectors=vectors)
    (answer,) = await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS)
    assert "do not fill" in assert_declined(answer, ErrorCode.BAD_VALUES).detail


@with_peer()
async def test_gradients_of_adapters_have_a_budget_of_their_own(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No microbatch makes them smaller: the texts may take as much as without an adapter."""

    text_bytes, num_bytes = 3 * ROWS * TOKENS * HIDDEN * 4, 4 * RANK * HIDDEN * 4

    talk = await greet(peer)
    rows = (AdapterRows(await keep(talk, pack()), ROWS),)
    asked = make_pass(kind=PassKind.BACKWARD, adapters=rows, adapter_vectors=4 * RANK)
    monkeypatch.setattr(pass_memory, "MOST_TENSOR_BYTES", num_bytes - 1)
    (answer,) = await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS)
    refusal = assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert refusal.retry_after_seconds is None
    # On the way there already, if that would be for nothing.
    there = make_pass(3, adapters=rows, trains_adapters=True)
    (answer,) = await ask(talk, there, HIDDEN=TEXTS)
    assert assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER).detail == refusal.detail

    monkeypatch.setattr(pass_memory, "MOST_TENSOR_BYTES", max(text_bytes, num_bytes))
    asked = replace(asked, pass_id=make_pass(2).pass_id)
    assert isinstance((await ask(talk, asked, HIDDEN=TEXTS, GRADIENTS=GRADIENTS))[-1], Passed)


@with_peer()
async def test_adapter_too_large_to_train_is_refused_before_it_comes(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_numbers = 4 * RANK * HIDDEN

    talk = await greet(peer)
    old = await keep(talk, pack(), num_trained=num_numbers)
    monkeypatch.setattr(PassBudget, "max_gradient_bytes", 4 * num_numbers - 1)
    for number, optimizer in enumerate((OptimizerKind.NONE, OptimizerKind.ADAMW), 2):
        head = make_head(
            pack(draw_matrices(2)),
            number,
            replaces=old,
            num_trained=num_numbers,
            optimizer=optimizer,
        )
        await talk.say(head)  # and nothing of it
        refusal = assert_declined(await talk.hear(), ErrorCode.NO_ROOM_FOR_ADAPTER)
        assert f"memory to train {num_numbers - 1:,} numbers" in refusal.detail
        assert refusal.retry_after_seconds is None
    assert isinstance(await run_forward(talk, old), Passed)
    await keep(talk, pack(draw_matrices(2)), number=5)  # to be used, but not trained


@with_peer()
async def test_stream_that_withdraws_what_is_not_there_is_idle(peer: Peer) -> None:
    talk, nobodys = await greet(peer), AdapterId(bytes([7]) * 32)
    answers: list[Message | None] = []
    for number in range(20):
        answers.append(await talk.ask(AdapterWithdrawal(make_pass(number + 1).pass_id, nobodys)))
        await asyncio.sleep(5.0)
        if isinstance(answers[-1], Declined):
            break
    assert len(answers) < 10
    assert isinstance(answers[0], AdapterKept)


@with_peer()
async def test_publisher_withdraws_what_others_use_and_they_come_to_their_end(peer: Peer) -> None:
    adapter_store = peer.service.adapters
    anna, bert = await greet(peer), await greet(peer, BOB)
    name = await keep(anna, pack(), is_published=True)
    with VirtualClock().hold():
        asked = make_pass(adapters=(AdapterRows(name, ROWS),))
        await bert.say(asked)  # whose tensors do not come yet
        await bert.wait_until_read()
        await bert.ask(AdapterWithdrawal(make_pass(7).pass_id, name))  # which is not his
        assert isinstance(await run_forward(anna, name, 2), Passed)

        answer = await anna.ask(AdapterWithdrawal(make_pass(8).pass_id, name))
        assert answer == AdapterKept(UploadId(make_pass(8).pass_id), 0.0)
        assert len(adapter_store) == 0
        assert adapter_store.shared.used_bytes == sum(map(len, pack()))  # Bert's by now
        await keep(anna, pack(draw_matrices(2)))
        await bert.say(*cut(asked, Slot.HIDDEN, TEXTS))
        while not isinstance(answer := await bert.hear(), Passed):
            assert isinstance(answer, Queued | PassPiece)
    assert_declined(await run_forward(bert, name, 3), ErrorCode.UNKNOWN_ADAPTER)
    assert adapter_store.shared.used_bytes == sum(map(len, pack(draw_matrices(2))))


@with_peer()
async def test_published_adapter_lives_as_long_as_its_publisher_says_so(peer: Peer) -> None:
    """However others use it; and to say so again, its head is enough."""

    name = await keep(await greet(peer), pack(), is_published=True)
    for number in range(1, 4):
        await asyncio.sleep(KEEP_SECONDS * 0.6)
        talk = await greet(peer)
        await talk.say(make_head(pack(), number, is_published=True))
        assert isinstance(await talk.hear(), AdapterKept)
        await talk.say(*cut_adapter(make_head(pack(), number).upload_id, pack()[1]))
    for number in (1, 2):
        answer = await run_forward(await greet(peer, BOB), name, number)
        await asyncio.sleep(KEEP_SECONDS * 0.6)
    assert isinstance(answer, Passed)
    assert (len(peer.service.adapters), peer.service.adapters.shared.used_bytes) == (0, 0)
    answer = await run_forward(await greet(peer, BOB), name)
    assert_declined(answer, ErrorCode.UNKNOWN_ADAPTER)


@with_peer()
async def test_private_adapter_is_for_whoever_brought_it_and_published_one_for_all(
    peer: Peer,
) -> None:
    anna, bert = await greet(peer), await greet(peer, BOB)
    far = await greet(peer.at_host("another host"))
    name = await keep(anna, pack())
    public = await keep(anna, pack(draw_matrices(2)), number=2, is_published=True)
    for number, stranger in enumerate((bert, far), 1):
        answer = await run_forward(stranger, name, number)
        assert_declined(answer, ErrorCode.UNKNOWN_ADAPTER)
        assert isinstance(await run_forward(stranger, public, number + 5), Passed)
    another = await greet(peer)  # a stream of the same client
    assert isinstance(await run_forward(another, name), Passed)


@with_peer()
async def test_stranger_cannot_give_up_what_is_not_his(peer: Peer) -> None:
    anna, bert = await greet(peer), await greet(peer, BOB)
    name = await keep(anna, pack())
    public = await keep(anna, pack(draw_matrices(3)), number=3, is_published=True)
    await keep(bert, pack(draw_matrices(2)), replaces=name)
    await keep(bert, pack(draw_matrices(4)), replaces=public)
    assert isinstance(await run_forward(anna, name), Passed)
    assert isinstance(await run_forward(anna, public, 2), Passed)


@with_peer()
async def test_new_state_replaces_the_old_one(peer: Peer) -> None:
    talk = await greet(peer)
    old = await keep(talk, pack())
    held = peer.service.adapters.shared.used_bytes
    new = await keep(talk, pack(draw_matrices(2)), replaces=old)

    assert peer.service.adapters.shared.used_bytes == held
    assert_declined(await run_forward(talk, old), ErrorCode.UNKNOWN_ADAPTER)
    assert isinstance(await run_forward(talk, new, 2), Passed)


@with_peer()
async def test_old_state_stays_where_there_is_no_room_for_the_new_one(peer: Peer) -> None:
    talk, num_bytes = await greet(peer), len(pack()[1])
    peer.service.adapters = AdapterStore(peer.service.clock, 4 * num_bytes)
    old = await keep(talk, pack())
    await talk.say(make_head(pack(draw_matrices(2)), 2, num_bytes=3 * num_bytes, replaces=old))
    assert_declined(await talk.hear(), ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert isinstance(await run_forward(talk, old), Passed)


@with_peer()
async def test_replaced_adapter_counts_while_a_pass_holds_it(peer: Peer) -> None:
    """Else whoever replaces and asks again, stream after stream, had all memory for nothing."""

    adapter_store, size = peer.service.adapters, sum(map(len, pack()))
    bringing, asking = await greet(peer), await greet(peer)
    old = await keep(bringing, pack())
    with VirtualClock().hold():
        asked = make_pass(adapters=(AdapterRows(old, 1), AdapterRows(NO_ADAPTER, ROWS - 1)))
        await asking.say(asked)  # whose tensors do not come yet
        await asking.wait_until_read()
        new = await keep(bringing, pack(draw_matrices(2)), replaces=old)
        assert (len(adapter_store), adapter_store.shared.used_bytes) == (1, 2 * size)
        await asking.say(*cut(asked, Slot.HIDDEN, TEXTS))
        while not isinstance(answer := await asking.hear(), Passed):
            assert isinstance(answer, Queued | PassPiece)
        assert adapter_store.shared.used_bytes == size

        await asking.say(make_pass(2, adapters=(AdapterRows(new, ROWS),)))
        await asking.wait_until_read()
        await keep(bringing, pack(draw_matrices(3)), replaces=new)
        assert adapter_store.shared.used_bytes == 2 * size
    await asking.stream.close()
    await asyncio.sleep(1)
    assert adapter_store.shared.used_bytes == size


@with_peer()
async def test_adapter_brought_twice_counts_once(peer: Peer) -> None:
    talk = await greet(peer)
    await keep(talk, pack())
    held = peer.service.adapters.shared.used_bytes
    await keep(talk, pack(), number=2)

    assert (peer.service.adapters.shared.used_bytes, len(peer.service.adapters)) == (held, 1)


@with_peer()
async def test_adapter_expires_when_nobody_uses_it(peer: Peer) -> None:
    talk = await greet(peer)
    answer = await bring(talk, pack())
    assert answer.keep_seconds == KEEP_SECONDS
    name = make_head(pack()).adapter
    await talk.stream.close()
    await asyncio.sleep(KEEP_SECONDS - 1)
    assert isinstance(await run_forward(await greet(peer), name), Passed)
    await asyncio.sleep(KEEP_SECONDS - 1)  # from when it was used
    assert isinstance(await run_forward(await greet(peer), name), Passed)
    await asyncio.sleep(KEEP_SECONDS + 1)
    assert (len(peer.service.adapters), peer.service.adapters.shared.used_bytes) == (0, 0)
    answer = await run_forward(await greet(peer), name)
    assert_declined(answer, ErrorCode.UNKNOWN_ADAPTER)


@with_peer()
async def test_peer_that_stops_serving_its_span_keeps_no_adapter_of_it(peer: Peer) -> None:
    """Those of the next one need the memory, and none of these fits there."""

    talk = await greet(peer)
    private = await keep(talk, pack())
    await keep(talk, pack(draw_matrices(2)), number=2, is_published=True)
    await talk.say(make_pass(adapters=(AdapterRows(private, ROWS),)))
    await talk.wait_until_read()
    adapter_store = peer.service.adapters
    assert len(adapter_store) == 2

    await peer.service.hang_up()

    assert (len(adapter_store), adapter_store.shared.used_bytes, adapter_store._timer) == (
        0,
        0,
        None,
    )


@with_peer()
async def test_client_that_disappears_leaves_nothing(peer: Peer) -> None:
    talk = await greet(peer)
    matrices = {**draw_matrices(), "filler": torch.zeros(100_000)}
    files = pack(matrices)
    head = make_head(files)
    first, *_ = cut_adapter(head.upload_id, files[1])
    await talk.say(head, first)
    await talk.wait_until_read()
    assert peer.service.adapters.shared.used_bytes > 400_000
    await talk.stream.close()
    await asyncio.sleep(1)
    assert peer.service.adapters.shared.used_bytes == 0


@with_peer()
async def test_adapter_that_never_comes_in_full_is_given_up(peer: Peer) -> None:
    talk = await peer.open()  # whose session keeps the stream
    files = pack({**draw_matrices(), "filler": torch.zeros(100_000)})
    head = make_head(files)
    await talk.say(head)
    answer = await talk.hear()
    assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert peer.service.adapters.shared.used_bytes == 0
    await talk.say(*cut_adapter(head.upload_id, files[1]))  # too late, and passed over
    await keep(talk, pack(), number=2)


@pytest.mark.parametrize(
    ("seconds", "refusal"), [(3.0, ErrorCode.BAD_VALUES), (13.0, ErrorCode.NO_ROOM_FOR_ADAPTER)]
)
@with_peer()
async def test_adapter_that_comes_slowly_is_read_and_one_that_drips_is_not(
    peer: Peer, seconds: float, refusal: ErrorCode
) -> None:
    talk = await peer.open()  # whose session keeps the stream
    files = pack({**draw_matrices(), "filler": torch.zeros(2**18)})  # 22 pieces
    head = make_head(files)
    await talk.say(head)
    for piece in cut_adapter(head.upload_id, files[1]):
        await asyncio.sleep(seconds)
        await talk.say(piece)
    while isinstance(answer := await talk.hear(), Queued):
        pass
    assert_declined(answer, refusal)


@with_peer()
async def test_stream_is_kept_while_an_adapter_comes_and_is_read(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = UploadStreamWork.read

    async def read_slowly(self: UploadStreamWork, upload: Any) -> Any:
        await asyncio.sleep(30.0)
        return await read(self, upload)

    monkeypatch.setattr(UploadStreamWork, "read", read_slowly)

    talk, files = await greet(peer), pack()
    head = make_head(files)
    await talk.say(head)
    await asyncio.sleep(50.0)
    await talk.say(*cut_adapter(head.upload_id, files[1]))
    while isinstance(answer := await talk.hear(), Queued):
        pass
    assert isinstance(answer, AdapterKept)


@with_peer()
async def test_quota_is_shared_between_clients(peer: Peer) -> None:
    size = sum(map(len, pack()))

    peer.service.adapters = AdapterStore(peer.service.clock, 8 * size)
    anna, bert = await greet(peer), await greet(peer, BOB)
    for number in range(4):  # of eight, three quarters for a host, and of these for a client
        await keep(anna, pack(draw_matrices(number)), number=number)
    answer = await bring(anna, pack(draw_matrices(5)), number=5)
    refusal = assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert refusal.retry_after_seconds is not None
    await keep(bert, pack())
    far = await greet(peer.at_host("another host"))
    await keep(far, pack())
    # In place of an old one there is room.
    old = make_head(pack(draw_matrices(0))).adapter
    await keep(anna, pack(draw_matrices(6)), number=6, replaces=old)

    peer.service.adapters = AdapterStore(peer.service.clock, size)
    answer = await bring(anna, pack(draw_matrices(7)), number=7)
    refusal = assert_declined(answer, ErrorCode.NO_ROOM_FOR_ADAPTER)
    assert "accepts at most" in refusal.detail
    assert refusal.retry_after_seconds is None


@with_peer()
async def test_files_that_cannot_be_used_are_refused_by_name(peer: Peer) -> None:
    """Each fault by its own words: `test_adapters.py`."""
    talk = await greet(peer)
    refusal = assert_declined(
        await bring(talk, pack(config={**CONFIG, "r": RANK + 1})), ErrorCode.BAD_VALUES
    )
    assert "has shape" in refusal.detail
    assert peer.service.adapters.shared.used_bytes == 0
    await keep(talk, pack(), number=2)


@with_peer()
async def test_strangers_files_are_not_read_where_tokens_are_computed(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def watch(*arguments: Any) -> Adapter:
        readers.append(threading.current_thread())
        return read_adapter(*arguments)

    monkeypatch.setattr(uploads, "read_adapter", watch)

    await keep(await greet(peer), pack())
    computing = await peer.service.compute.call(threading.current_thread)
    assert readers
    assert not {computing, threading.current_thread()}.intersection(readers)


@with_peer()
async def test_files_that_are_not_what_their_digest_says_are_refused(peer: Peer) -> None:
    talk = await greet(peer)
    answer = await bring(talk, pack(), adapter=AdapterId(bytes(32)))
    refusal = assert_declined(answer, ErrorCode.BAD_VALUES)
    assert "does not match its digest" in refusal.detail


@with_peer()
async def test_gradients_that_are_not_finite_are_refused_by_name(peer: Peer) -> None:
    """The hidden states' own are: only what an adapter makes of them is not."""

    talk = await greet(peer)
    matrices = {name: 1e-30 * matrix for name, matrix in draw_matrices().items()}
    rows = (AdapterRows(await keep(talk, pack(matrices)), ROWS),)
    asked = make_pass(kind=PassKind.BACKWARD, adapters=rows, adapter_vectors=4 * RANK)
    with VirtualClock().hold():
        (answer,) = await ask(talk, asked, HIDDEN=1e-20 * TEXTS, GRADIENTS=1e37 * GRADIENTS)
    refusal = assert_declined(answer, ErrorCode.BAD_VALUES)
    assert "finite" in refusal.detail or "overflow" in refusal.detail
    assert isinstance(await run_forward(talk, rows[0].adapter, 2), Passed)


@pytest.mark.parametrize("breach", ["second head", "gap"])
@with_peer()
async def test_pieces_that_belong_nowhere_end_the_stream(peer: Peer, breach: str) -> None:
    files = pack({**draw_matrices(), "filler": torch.zeros(100_000)})
    head = make_head(files)
    _, second, *_ = cut_adapter(head.upload_id, files[1])
    said = {"second head": (head, head), "gap": (head, second)}[breach]

    talk = await greet(peer)
    await talk.say(*said)
    assert assert_declined(await talk.hear(), ErrorCode.BAD_FRAME).session is None
    await asyncio.sleep(1)
    assert peer.service.adapters.shared.used_bytes == 0


@with_peer()
async def test_client_hears_that_its_adapter_is_read_if_it_understands_that(peer: Peer) -> None:
    for number, version in enumerate((PASS_VERSION, OPTIMIZER_VERSION)):
        talk = await peer.dial()
        await talk.ask(replace(HELLO, max_version=version, client=ALICE))
        files = pack(draw_matrices(number))
        head = make_head(files, number)
        await talk.say(head, *cut_adapter(head.upload_id, files[1]))
        answer = await talk.hear()
        assert isinstance(answer, AdapterKept if version == PASS_VERSION else Queued)


def test_rows_with_an_adapter_are_charged_for_its_numbers() -> None:
    part = AdapterPart("up", slice(0, 8), torch.ones(4, 8), torch.ones(8, 4), 1.0, None)
    adapter = Adapter(4, {(SPAN.start, "up"): (part,)})
    asked = make_pass(num_rows=3, kind=PassKind.BACKWARD)
    work = WireWork(asked, {}, HIDDEN, (adapter, None, adapter))

    # A number is computed in the time of four bytes of weights, in all blocks together.
    weights = 4 * adapter.num_numbers // len(SPAN)
    assert count_cost(work, weights) == (2 + 1 + 2) * TOKENS * len(SPAN) * 3
    assert count_cost(replace(work, adapters=()), weights) == 3 * TOKENS * len(SPAN) * 3
