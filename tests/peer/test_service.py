"""A peer's side of a stream, driven by hand over the loopback network on virtual time.

Every test ends with the same question: is nothing left? No session, page, task or unread error.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.compress import decode_tensor, encode_tensor
from shoal.kernels.quantize import WeightFormat
from shoal.peer.config import PeerConfig
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.engine import Engine, StepWork
from shoal.peer.engine.loader import open_checkpoint
from shoal.peer.service import Service, ServiceFacts
from shoal.peer.step_work import TORCH_DTYPES
from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode, RefusedError, ShoalError, UnavailableError
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
from shoal.protocol.net.clock import VirtualClock, VirtualEventLoop, run_virtual
from shoal.protocol.net.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Lane, Stream
from shoal.protocol.session import MAX_CACHED_ANSWER_BYTES, MAX_CACHED_ANSWERS
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireCodec, WireDtype, WireTensor
from shoal.protocol.wire import decode_frame, encode_frame

HIDDEN = 64
MODEL_ID = ModelId("a" * 32)
PEER_ID = Identity(bytes(32)).peer_id
SPAN = Span(1, 3)
IDLE_SECONDS = 600.0
HELLO = Hello(1, 1, "a test")


class HoldingComputeThread(ComputeThread):
    """Keeps virtual time still while the engine computes."""

    def submit(self, work: StepWork) -> Any:
        return hold_time(super().submit(work))

    def call(self, function: Callable[[], Any]) -> Any:
        return hold_time(super().call(function))


def hold_time(future: asyncio.Future[Any]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualEventLoop)
    hold = loop.hold()
    hold.__enter__()
    future.add_done_callback(lambda _: hold.__exit__(None, None, None))
    return future


class GatedEngine:
    """An engine that stops at a gate, before opening a cache or before computing."""

    def __init__(self, engine: Engine, gate: str) -> None:
        self._engine = engine
        self._gate = gate
        self.num_steps = 0
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open_cache(self, *arguments: Any) -> Any:
        self._wait_at("open")
        return self._engine.open_cache(*arguments)

    def execute(self, batch: Sequence[StepWork]) -> list[Tensor | ShoalError]:
        self._wait_at("execute")
        self.num_steps += len(batch)
        return self._engine.execute(batch)

    def _wait_at(self, point: str) -> None:
        if point == self._gate:
            self.entered.set()
            assert self.leave.wait(30)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


class FailingEngine:
    """An engine whose next calls of one kind fail with something nobody foresaw."""

    def __init__(self, engine: Engine, point: str, num_failures: int = 1) -> None:
        self._engine = engine
        self._point = point
        self._num_failures = num_failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open_cache(self, *arguments: Any) -> Any:
        self._fail_at("open")
        return self._engine.open_cache(*arguments)

    def execute(self, batch: Sequence[StepWork]) -> list[Tensor | ShoalError]:
        self._fail_at("execute")
        return self._engine.execute(batch)

    def _fail_at(self, point: str) -> None:
        if point == self._point and self._num_failures:
            self._num_failures -= 1
            raise ZeroDivisionError("the device is on fire")


class Talk:
    """One stream of a client that says whatever it is told to."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def say(self, *messages: Message) -> None:
        for message in messages:
            await self.stream.send(encode_frame(message))

    async def hear(self) -> Message | None:
        frame = await self.stream.receive()
        return None if frame is None else decode_frame(frame)

    async def ask(self, message: Message) -> Message | None:
        await self.say(message)
        return await self.hear()


@dataclass
class Peer:
    """A service that listens, and the network around it."""

    service: Service
    compute: ComputeThread
    engine: Any
    network: LoopbackNetwork
    client: LoopbackTransport
    clients: list[LoopbackTransport]
    endpoint: Any

    async def dial(self, lane: Lane = Lane.INTERACTIVE) -> Talk:
        return Talk(await self.client.open_stream(self.endpoint, lane))

    def at_host(self, name: str) -> Peer:
        """Return the same peer, as another host of the network sees it."""
        client = LoopbackTransport(self.network, name)
        self.clients.append(client)
        return replace(self, client=client)

    async def greet(self, lane: Lane = Lane.INTERACTIVE) -> Talk:
        talk = await self.dial(lane)
        assert isinstance(await talk.ask(HELLO), Welcome)
        return talk

    async def open(self, number: int = 1, **changes: Any) -> Talk:
        talk = await self.greet()
        assert isinstance(await talk.ask(make_open(number, **changes)), Opened)
        return talk

    async def wait_until_empty(self) -> None:
        """Wait until nothing of any session is left, and check that that is true."""
        assert await self.service.wait_until_empty(60)
        while self.service.opening:  # noqa: ASYNC110 - a test on virtual time
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        statistics = await self.compute.call(self.engine.pool.statistics)
        assert (statistics.used_bytes, statistics.num_sessions) == (0, 0)
        await self.compute.call(self.engine.pool.check_integrity)

    async def count_used_bytes(self) -> int:
        return (await self.compute.call(self.engine.pool.statistics)).used_bytes


def make_session(number: int) -> SessionId:
    return SessionId(bytes([number % 256, number // 256]) + b"-a-test-session"[:14])


def make_open(number: int = 1, **changes: Any) -> Open:
    opening = Open(make_session(number), 1, MODEL_ID, SPAN, 1, 100, WireDtype.FP32)
    return replace(opening, **changes)


def draw_hidden(seed: int, num_rows: int = 1, num_tokens: int = 1, width: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_tokens, width, generator=generator)


def make_step(
    sequence: int, position: int, hidden: Tensor, number: int = 1, **changes: Any
) -> Step:
    rows, tokens, width = hidden.shape
    data = encode_tensor(hidden)
    wire = WireTensor(WireDtype.FP32, WireCodec.RAW, rows, tokens, width, data)
    return replace(Step(make_session(number), 1, sequence, position, wire), **changes)


def expect_output(answer: Message | None) -> Tensor:
    assert isinstance(answer, Output), answer
    tensor = answer.hidden
    return decode_tensor(tensor.data, TORCH_DTYPES[tensor.dtype], tensor.shape)


def assert_declined(answer: Message | None, code: ErrorCode) -> Declined:
    assert isinstance(answer, Declined), answer
    assert answer.code is code, answer
    return answer


@pytest.fixture(scope="module")
def engine(tiny_models: Any) -> Engine:
    checkpoint = open_checkpoint(tiny_models.get().directory)
    return Engine.load(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=2**22)


def run(
    engine: Any,
    test: Callable[[Peer], Awaitable[None]],
    max_sessions: int = 8,
    idle_seconds: float = IDLE_SECONDS,
) -> None:
    """Run a test against a fresh service; then nothing of it may be left."""
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        network = LoopbackNetwork()
        async with HoldingComputeThread(engine) as compute:
            facts = ServiceFacts(PEER_ID, MODEL_ID, max_sessions, idle_seconds)
            service = Service(facts, engine, compute, VirtualClock())
            server = LoopbackTransport(network, "peer")
            listener = await server.listen("peer", 0, service.serve)
            client = LoopbackTransport(network, "client")
            peer = Peer(service, compute, engine, network, client, [client], listener.endpoint)
            await test(peer)
            for client in peer.clients:
                await client.close()
            await peer.wait_until_empty()
            await server.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
    gc.collect()
    assert problems == []
    assert not [thread for thread in threading.enumerate() if thread.name == "compute"]


def compute_alone(engine: Engine, *parts: Tensor, **options: Any) -> list[Tensor]:
    """Return what the engine makes of some steps in a session of its own."""
    cache = engine.open_cache(parts[0].shape[0], 100, SPAN)
    results: list[Tensor] = []
    for part in parts:
        work = StepWork(cache, SPAN, cache.length, part, **options)
        (result,) = engine.execute([work])
        assert isinstance(result, Tensor)
        results.append(result)
    cache.close()
    return results


def test_hello_is_answered_with_who_the_peer_is(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        answer = await (await peer.dial()).ask(Hello(0, 7, "from the future"))

        assert isinstance(answer, Welcome)
        assert (answer.version, answer.peer_id, answer.model_id) == (1, PEER_ID, MODEL_ID)
        assert answer.span == SPAN
        assert answer.wall_seconds == pytest.approx(VirtualClock().wall())

    run(engine, test)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (Hello(2, 9, "too new"), ErrorCode.BAD_VERSION),
        (Hello(0, 0, "too old"), ErrorCode.BAD_VERSION),
        (make_open(), ErrorCode.BAD_FRAME),
        (make_step(1, 0, torch.zeros(1, 1, HIDDEN)), ErrorCode.BAD_FRAME),
        (Close(make_session(1), 1), ErrorCode.BAD_FRAME),
        (Declined(None, 0, ErrorCode.BUSY, "you are"), ErrorCode.BAD_FRAME),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, ErrorCode) else value.name,
)
def test_stream_that_begins_wrongly_is_ended_with_the_reason(
    engine: Engine, first: Message, code: ErrorCode
) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.dial()

        assert assert_declined(await talk.ask(first), code).session is None
        assert await talk.hear() is None

    run(engine, test)


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
def test_messages_of_a_peer_are_not_taken_from_a_client(engine: Engine, message: Message) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open()

        assert assert_declined(await talk.ask(message), ErrorCode.BAD_FRAME).session is None
        assert await talk.hear() is None
        await peer.wait_until_empty()

    run(engine, test)


def test_damaged_frame_ends_its_stream_and_no_other(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        bystander = await peer.open(1)
        talk = await peer.open(2)

        await talk.stream.send(b"sh\x01" + bytes(200))

        assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
        assert await talk.hear() is None
        expect_output(await bystander.ask(make_step(1, 0, draw_hidden(1))))
        assert set(peer.service.sessions) == {make_session(1)}

    run(engine, test)


def test_steps_compute_what_the_engine_computes(engine: Engine) -> None:
    prompt, token = draw_hidden(1, 2, 5), draw_hidden(2, 2, 1)
    expected = compute_alone(engine, prompt, token)

    async def test(peer: Peer) -> None:
        talk = await peer.open(num_rows=2)

        outputs = [
            expect_output(await talk.ask(make_step(1, 0, prompt))),
            expect_output(await talk.ask(make_step(2, 5, token))),
        ]

        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)

    run(engine, test)


def test_options_of_a_step_reach_the_engine(engine: Engine) -> None:
    prompt, token = draw_hidden(1, 2, 5), draw_hidden(2, 2, 1)
    cache = engine.open_cache(2, 100, SPAN)
    engine.execute([StepWork(cache, SPAN, 0, prompt)])
    (wanted,) = engine.execute([StepWork(cache, SPAN, 5, token, row_map=(1, 1), decoded=True)])
    cache.close()

    async def test(peer: Peer) -> None:
        talk = await peer.open(num_rows=2, dtype=WireDtype.BF16)
        last = make_step(1, 0, prompt, last_token_only=True)

        answer = await talk.ask(last)
        assert expect_output(answer).shape == (2, 1, HIDDEN)
        answer = await talk.ask(make_step(2, 5, token, row_map=(1, 1), is_decoded=True))

        output = expect_output(answer)
        assert output.dtype == torch.bfloat16
        assert isinstance(wanted, Tensor)
        assert torch.equal(output, wanted.to(torch.bfloat16))

    run(engine, test)


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
def test_open_is_refused_and_the_stream_goes_on(
    engine: Engine, changes: dict[str, Any], code: ErrorCode
) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.greet()

        answer = assert_declined(await talk.ask(make_open(**changes)), code)

        assert (answer.session, answer.sequence) == (make_session(1), 0)
        assert peer.service.sessions == {}
        assert isinstance(await talk.ask(make_open()), Opened)

    run(engine, test)


def test_part_of_the_span_may_be_opened(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        opened = await (await peer.greet()).ask(make_open(span=Span(2, 3), max_tokens=512))

        assert isinstance(opened, Opened)
        assert opened.free_kv_tokens > 0

    run(engine, test)


@pytest.mark.parametrize(
    "rows", [0, limits.MAX_BATCH_ROWS + 1, 2**31], ids=["none", "too many", "absurd"]
)
def test_number_of_rows_beyond_the_limits_ends_the_stream(engine: Engine, rows: int) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.greet()
        # Our own encoder would not let it pass, so one byte string is made of two halves.
        good = encode_frame(make_open(num_rows=77))
        at = good.index(b"\x20\x4d")  # field 4, the value 77
        varint = bytearray()
        value = rows
        while value > 0x7F:
            varint.append(value & 0x7F | 0x80)
            value >>= 7
        varint.append(value)
        control = good[60:at] + b"\x20" + bytes(varint) + good[at + 2 :]
        frame = good[:52] + len(control).to_bytes(4, "little") + good[56:60] + control

        await talk.stream.send(frame)

        assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
        assert await talk.hear() is None

    run(engine, test)


def test_session_id_cannot_be_opened_twice(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        owner, other = await peer.open(), await peer.greet()

        assert_declined(await owner.ask(make_open()), ErrorCode.BAD_FRAME)
        assert_declined(await other.ask(make_open(epoch=9)), ErrorCode.BAD_FRAME)
        await other.stream.close()

        expect_output(await owner.ask(make_step(1, 0, draw_hidden(1))))

    run(engine, test)


def test_session_id_cannot_be_opened_twice_at_once(engine: Engine) -> None:
    gated = GatedEngine(engine, "open")

    async def test(peer: Peer) -> None:
        talks = [await peer.greet(), await peer.greet()]
        for talk in talks:
            await talk.say(make_open())
        await gated.wait_entered()
        gated.leave.set()

        answers = [await talk.hear() for talk in talks]

        (owner,) = [n for n, answer in enumerate(answers) if isinstance(answer, Opened)]
        assert_declined(answers[1 - owner], ErrorCode.BAD_FRAME)
        await talks[1 - owner].stream.close()
        expect_output(await talks[owner].ask(make_step(1, 0, draw_hidden(1))))

    run(gated, test)


def test_peer_holds_so_many_sessions_and_no_more(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talks = [await peer.at_host(f"host {number}").open(number) for number in (1, 2, 3)]

        refusal = assert_declined(await talks[0].ask(make_open(4)), ErrorCode.BUSY)
        assert refusal.retry_after_seconds
        await talks[1].say(Close(make_session(2), 1))
        await talks[1].ask(HELLO)  # its answer says that the Close was read

        assert isinstance(await talks[0].ask(make_open(4)), Opened)

    run(engine, test, max_sessions=3)


def test_one_address_holds_no_more_sessions_than_it_leaves_free(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        greedy = await peer.greet()
        for number in range(5):
            assert isinstance(await greedy.ask(make_open(number)), Opened)

        refusal = assert_declined(await greedy.ask(make_open(5)), ErrorCode.BUSY)
        elsewhere = await peer.greet()
        assert_declined(await elsewhere.ask(make_open(5)), ErrorCode.BUSY)
        neighbour = await peer.at_host("neighbour").open(6)
        assert isinstance(await neighbour.ask(make_open(7)), Opened)
        assert_declined(await neighbour.ask(make_open(8)), ErrorCode.BUSY)
        await peer.at_host("newcomer").open(9)

        assert refusal.retry_after_seconds
        await greedy.stream.close()
        await peer.at_host("newcomer").open(10)

    run(engine, test, max_sessions=8)


def test_one_address_holds_no_more_streams_than_it_leaves_free(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
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

    run(engine, test, max_sessions=2)


def test_sessions_being_opened_count(engine: Engine) -> None:
    gated = GatedEngine(engine, "open")

    async def test(peer: Peer) -> None:
        talks = [await peer.greet() for _ in range(3)]
        for number, talk in enumerate(talks):
            await talk.say(make_open(number))
        await gated.wait_entered()
        gated.leave.set()

        answers = [await talk.hear() for talk in talks]

        assert sorted(type(answer).__name__ for answer in answers) == ["Declined"] + 2 * ["Opened"]

    run(gated, test, max_sessions=2)


def test_one_stream_holds_so_many_sessions(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.greet()
        for number in range(limits.MAX_SESSIONS_PER_STREAM):
            assert isinstance(await talk.ask(make_open(number)), Opened)

        assert_declined(await talk.ask(make_open(200)), ErrorCode.BUSY)

        assert isinstance(await (await peer.greet()).ask(make_open(200)), Opened)

    run(engine, test, max_sessions=100)


def test_session_larger_than_the_kv_budget_is_refused_for_good(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.get().directory)
    small = Engine.load(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=2**15)

    async def test(peer: Peer) -> None:
        refusal = assert_declined(
            await (await peer.greet()).ask(make_open(num_rows=64)), ErrorCode.CACHE_FULL
        )

        assert refusal.retry_after_seconds is None

    run(small, test)


def test_step_that_outgrows_the_kv_budget_is_refused_and_can_be_tried_again(
    tiny_models: Any,
) -> None:
    checkpoint = open_checkpoint(tiny_models.get().directory)
    # Room for three pages of 64 tokens of one row.
    page_bytes = 64 * 2 * len(SPAN) * 2 * 16 * 4
    small = Engine.load(checkpoint, SPAN, WeightFormat.FP32, kv_budget_bytes=3 * page_bytes)
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
        await first.ask(HELLO)
        output = expect_output(await second.ask(make_step(2, 0, prompt[:, :100], number=2)))

        assert torch.equal(output, wanted)

    run(small, test)


def test_session_table_on_the_wire(engine: Engine) -> None:
    tokens = [draw_hidden(seed) for seed in range(4)]
    expected = compute_alone(engine, tokens[0], tokens[1], tokens[3])

    async def test(peer: Peer) -> None:
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

    run(engine, test)


def test_repeat_of_a_token_is_answered_again_and_that_of_a_prompt_is_not(engine: Engine) -> None:
    """The answers of tokens fit into a corner of the memory; those of prompts would fill it."""
    num_rows, num_tokens = 8, 90
    prompt, token = draw_hidden(1, num_rows, num_tokens), draw_hidden(2, num_rows, 1)
    assert prompt.nbytes > MAX_CACHED_ANSWER_BYTES

    async def test(peer: Peer) -> None:
        talk = await peer.open(num_rows=num_rows)
        expect_output(await talk.ask(make_step(1, 0, prompt)))
        answer = await talk.ask(make_step(2, num_tokens, token))

        await talk.say(make_step(1, 0, prompt))
        again = await talk.ask(make_step(2, num_tokens, token))

        assert isinstance(answer, Output)
        assert again == answer

    run(engine, test)


def test_kept_answers_of_all_sessions_of_a_peer_are_bounded() -> None:
    num_sessions = PeerConfig.max_sessions

    assert num_sessions * MAX_CACHED_ANSWERS * MAX_CACHED_ANSWER_BYTES <= 64 * 2**20


def test_answers_keep_the_order_of_the_questions(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
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

    run(engine, test)


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
def test_bad_step_is_refused_and_changes_nothing(
    engine: Engine, step: Step, code: ErrorCode
) -> None:
    good = draw_hidden(2, 1, 3)
    (wanted,) = compute_alone(engine, good)

    async def test(peer: Peer) -> None:
        talk = await peer.open()

        refusal = assert_declined(await talk.ask(step), code)
        output = expect_output(await talk.ask(make_step(2, 0, good)))

        assert (refusal.session, refusal.sequence) == (step.session, step.sequence)
        assert torch.equal(output, wanted)

    run(engine, test)


def test_step_behind_a_refused_one_is_refused_as_well(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open()

        await talk.say(
            make_step(1, 0, torch.full((1, 3, HIDDEN), float("nan"))),
            make_step(2, 3, draw_hidden(1)),
        )

        assert_declined(await talk.hear(), ErrorCode.BAD_VALUES)
        assert isinstance(await talk.hear(), Declined | Gap)
        gap = await talk.ask(make_step(3, 3, draw_hidden(1)))
        assert isinstance(gap, Gap)
        assert gap.length == 0
        expect_output(await talk.ask(make_step(4, 0, draw_hidden(1))))

    run(engine, test)


def test_step_whose_answer_would_not_fit_a_frame_is_refused(engine: Engine) -> None:
    width, tokens = 4096, 1500  # 12 MB as bf16, 24 MB as fp32
    data = bytes(2 * width * tokens)
    hidden = WireTensor(WireDtype.BF16, WireCodec.RAW, 1, tokens, width, data)

    async def test(peer: Peer) -> None:
        talk = await peer.open(max_tokens=512)
        talk_of = Step(make_session(1), 1, 1, 0, hidden)

        refusal = assert_declined(await talk.ask(talk_of), ErrorCode.TOO_LONG)

        assert refusal.session == make_session(1)
        expect_output(await talk.ask(make_step(2, 0, draw_hidden(1))))

    run(engine, test)


def test_second_stream_may_step_a_session_and_its_end_leaves_it(engine: Engine) -> None:
    parts = [draw_hidden(seed, 1, 4) for seed in range(3)]
    expected = compute_alone(engine, *parts)

    async def test(peer: Peer) -> None:
        interactive, bulk = await peer.open(), await peer.greet(Lane.BULK)

        outputs = [
            expect_output(await talk.ask(make_step(index + 1, 4 * index, parts[index])))
            for index, talk in enumerate((interactive, bulk))
        ]
        await bulk.say(Close(make_session(1), 1))  # not its own: nothing happens
        await bulk.stream.close()
        outputs.append(expect_output(await interactive.ask(make_step(3, 8, parts[2]))))

        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)

    run(engine, test)


def test_bulk_stream_is_told_when_the_session_is_gone(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        interactive, bulk = await peer.open(), await peer.greet(Lane.BULK)
        await interactive.stream.close()
        await peer.wait_until_empty()

        answer = await bulk.ask(make_step(1, 0, draw_hidden(1)))

        assert_declined(answer, ErrorCode.UNKNOWN_SESSION)

    run(engine, test)


def test_close_frees_the_pages_and_the_stream_goes_on(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open()
        expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, 1, 90))))
        assert await peer.count_used_bytes() > 0

        await talk.say(Close(make_session(1), 1), Close(make_session(1), 1))
        answer = await talk.ask(make_step(2, 90, draw_hidden(1)))

        assert_declined(answer, ErrorCode.UNKNOWN_SESSION)
        assert await peer.count_used_bytes() == 0
        assert isinstance(await talk.ask(make_open(1)), Opened)

    run(engine, test)


def test_stream_that_breaks_while_a_session_is_opened_leaves_nothing(engine: Engine) -> None:
    gated = GatedEngine(engine, "open")

    async def test(peer: Peer) -> None:
        talk = await peer.greet()
        await talk.say(make_open())
        await gated.wait_entered()

        peer.network.kill("client")
        gated.leave.set()

        await peer.wait_until_empty()
        peer.network.revive("client")

    run(gated, test)


def test_stream_that_breaks_while_a_step_is_computed_leaves_nothing(engine: Engine) -> None:
    gated = GatedEngine(engine, "execute")

    async def test(peer: Peer) -> None:
        talk = await peer.open()
        await talk.say(make_step(1, 0, draw_hidden(1, 1, 90)), make_step(2, 90, draw_hidden(2)))
        await gated.wait_entered()

        peer.network.kill("client")
        gated.leave.set()

        await peer.wait_until_empty()
        peer.network.revive("client")

    run(gated, test)


class PatientStream:
    """A stream of a client that said something and goes on listening."""

    remote_host = None

    def __init__(self, *messages: Message) -> None:
        self._frames = [encode_frame(message) for message in messages]

    async def send(self, frame: bytes) -> None:
        return

    async def receive(self) -> bytes | None:
        return self._frames.pop(0) if self._frames else await asyncio.Future[None]()

    async def close(self) -> None:
        return


def test_serving_that_is_cancelled_while_a_session_is_opened_leaves_nothing(
    engine: Engine,
) -> None:
    gated = GatedEngine(engine, "open")

    async def test(peer: Peer) -> None:
        serving = asyncio.create_task(peer.service.serve(PatientStream(HELLO, make_open())))
        await gated.wait_entered()
        serving.cancel()
        await asyncio.wait([serving])
        gated.leave.set()

        await peer.wait_until_empty()

    run(gated, test)


def test_steps_that_wait_when_their_session_is_closed_are_never_computed(engine: Engine) -> None:
    gated = GatedEngine(engine, "execute")

    async def test(peer: Peer) -> None:
        talk = await peer.open()
        await talk.say(*(make_step(index + 1, index, draw_hidden(index)) for index in range(3)))
        await gated.wait_entered()
        await talk.say(Close(make_session(1), 1))
        assert await peer.service.wait_until_empty(60)
        gated.leave.set()

        # None of the three is answered any more; what comes later is.
        assert isinstance(await talk.ask(make_open(2)), Opened)
        await peer.count_used_bytes()
        assert gated.num_steps == 1

    run(gated, test)


def test_answers_to_a_client_that_said_its_last_word_still_leave(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open()
        await talk.say(make_step(1, 0, draw_hidden(1)))

        await talk.stream.send(encode_frame(Close(make_session(9), 1)))
        answer = await talk.hear()
        await talk.stream.close()

        expect_output(answer)
        await peer.wait_until_empty()

    run(engine, test)


def test_two_hundred_aborted_sessions_leave_nothing(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        for number in range(200):
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

    run(engine, test, max_sessions=256)


def test_engine_that_fails_answers_internal_and_goes_on(engine: Engine) -> None:
    hidden = draw_hidden(1, 1, 3)
    (wanted,) = compute_alone(engine, hidden)

    async def test(peer: Peer) -> None:
        talk = await peer.open()

        refusal = assert_declined(await talk.ask(make_step(1, 0, hidden)), ErrorCode.INTERNAL)
        output = expect_output(await talk.ask(make_step(2, 0, hidden)))

        assert "fire" not in refusal.detail
        assert torch.equal(output, wanted)

    run(FailingEngine(engine, "execute"), test)


def test_cache_that_cannot_be_opened_answers_internal_and_goes_on(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.greet()

        refusal = assert_declined(await talk.ask(make_open()), ErrorCode.INTERNAL)
        answer = await talk.ask(make_open())

        assert "fire" not in refusal.detail
        assert isinstance(answer, Opened)

    run(FailingEngine(engine, "open"), test)


def test_draining_peer_serves_old_sessions_and_takes_no_new_ones(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open(1)
        peer.service.is_draining = True

        assert_declined(await talk.ask(make_open(2)), ErrorCode.DRAINING)
        expect_output(await talk.ask(make_step(1, 0, draw_hidden(1))))
        assert not await peer.service.wait_until_empty(10)
        waiting = asyncio.create_task(peer.service.wait_until_empty(1000))
        await talk.say(Close(make_session(1), 1))

        assert await waiting

    run(engine, test)


def test_idle_stream_is_ended_and_its_session_freed(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open()
        await asyncio.sleep(IDLE_SECONDS - 1)
        expect_output(await talk.ask(make_step(1, 0, draw_hidden(1))))
        opened_at = VirtualClock().now()

        assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)

        assert VirtualClock().now() - opened_at == pytest.approx(IDLE_SECONDS)
        assert await talk.hear() is None
        await peer.wait_until_empty()

    run(engine, test)


def test_session_that_is_stepped_over_another_stream_is_not_idle(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk, bulk = await peer.open(), await peer.greet(Lane.BULK)

        for index in range(5):
            expect_output(await bulk.ask(make_step(index + 1, index, draw_hidden(index))))
            await asyncio.sleep(0.6 * IDLE_SECONDS)
        expect_output(await talk.ask(make_step(6, 5, draw_hidden(9))))

    run(engine, test)


@pytest.mark.parametrize("says_hello", [False, True])
def test_stream_without_a_session_is_ended_soon(engine: Engine, says_hello: bool) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.greet() if says_hello else await peer.dial()

        assert_declined(await talk.hear(), ErrorCode.UNKNOWN_SESSION)

        assert VirtualClock().now() < 60
        assert await talk.hear() is None

    run(engine, test, idle_seconds=24 * 3600)


def test_client_that_never_reads_its_answers_is_dropped(engine: Engine) -> None:
    async def test(peer: Peer) -> None:
        talk = await peer.open(max_tokens=512, num_rows=32)
        hidden = draw_hidden(1, 32, 256)  # 2 MB each way; the network holds 4 MB

        async def flood() -> None:
            for sequence in range(1, 100):
                await talk.say(make_step(sequence, 0, hidden))

        with pytest.raises(UnavailableError):
            await flood()

        await peer.wait_until_empty()

    run(engine, test, idle_seconds=60.0)


def test_compute_thread_that_stops_declines_what_waits(engine: Engine) -> None:
    async def main() -> None:
        async with HoldingComputeThread(engine) as compute:
            cache = await compute.call(lambda: engine.open_cache(1, 10, SPAN))
        future = compute.submit(StepWork(cache, SPAN, 0, draw_hidden(1)))
        with pytest.raises(RefusedError) as caught:
            await future
        assert caught.value.code is ErrorCode.DRAINING
        cache.close()

    run_virtual(main())
