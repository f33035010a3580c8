"""One hop on the wire, against scripted peers on the loopback network and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.client.hop_link import BULK_FRAME_BYTES, HopLink, LinkFacts
from shoal.client.router import Hop
from shoal.protocol.announcements import Announcement, PeerState
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
    UsageError,
)
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ClientToken, ModelId, PeerId, SessionId
from shoal.protocol.messages import (
    Close,
    Declined,
    Gap,
    Hello,
    Message,
    Open,
    Opened,
    Output,
    Queued,
    Step,
    Welcome,
)
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import Lane, Stream
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireCodec, WireDtype, WireTensor
from shoal.protocol.wire import decode_frame, encode_frame

MODEL_ID = ModelId("a" * 32)
PEER_ID = Identity(bytes(32)).peer_id
OTHER_ID = Identity(bytes([1]) * 32).peer_id
SESSION, OTHER_SESSION = SessionId(b"s" * 16), SessionId(b"t" * 16)
SPAN = Span(0, 4)
WIDTH = 8
CLIENT = ClientToken(b"c" * 16)
OPEN = Open(SESSION, 3, MODEL_ID, Span(0, 9), 1, 100, WireDtype.FP32)
TIMEOUT = 5.0

Answer = Message | bytes | None
Script = Callable[[Message], Answer]


def answer_honestly(message: Message) -> Answer:
    """Greet, open, and answer every step with its own input."""
    if isinstance(message, Hello):
        return Welcome(1, "scripted", PEER_ID, MODEL_ID, SPAN, 0.0)
    if isinstance(message, Open):
        return Opened(message.session, message.epoch, 0.25, 77)
    if isinstance(message, Step):
        return make_output(message)
    return None


def make_output(step: Step, **changes: Any) -> Output:
    output = Output(step.session, step.epoch, step.sequence, step.position, step.hidden)
    return replace(output, **changes)


def make_tensor(
    tokens: int = 1, rows: int = 1, width: int = WIDTH, dtype: WireDtype = WireDtype.FP32
) -> WireTensor:
    size = 4 if dtype is WireDtype.FP32 else 2
    return WireTensor(
        dtype, WireCodec.RAW, rows, tokens, width, bytes(size * rows * tokens * width)
    )


def make_step(tokens: int = 1, **changes: Any) -> Step:
    return replace(Step(SESSION, 3, 1, 0, make_tensor(tokens)), **changes)


@dataclass
class Scene:
    """A scripted peer, the network to it, and everything that it heard."""

    network: LoopbackNetwork
    transport: LoopbackTransport
    endpoint: Endpoint
    script: Script = answer_honestly
    heard: list[list[Message]] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        heard: list[Message] = []
        self.heard.append(heard)
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            heard.append(message)
            answer = self.script(message)
            if answer is None and not isinstance(message, Close):
                return  # hang up
            if isinstance(answer, bytes):
                await stream.send(answer)
            elif answer is not None:
                await stream.send(encode_frame(answer))

    def make_hop(self, *endpoints: Endpoint, peer_id: PeerId = PEER_ID) -> Hop:
        return Hop(make_announcement(endpoints or (self.endpoint,), peer_id), SPAN)

    async def open(self, hop: Hop | None = None) -> tuple[HopLink, LinkFacts]:
        return await HopLink.open(
            self.transport, VirtualClock(), hop or self.make_hop(), OPEN, CLIENT, TIMEOUT
        )


def make_announcement(endpoints: tuple[Endpoint, ...], peer_id: PeerId = PEER_ID) -> Announcement:
    return Announcement(
        peer_id=peer_id,
        model_id=MODEL_ID,
        num_blocks=9,
        span=SPAN,
        state=PeerState.ONLINE,
        endpoints=endpoints,
        min_version=1,
        max_version=1,
        weights="fp32",
        compute_dtype="fp32",
        sequence=1,
        issued_at=1.0,
        expires_at=2.0,
    )


def run(test: Callable[[Scene], Awaitable[None]], link: Link | None = None) -> None:
    """Run a test; whatever it did, no stream may be left open when it ends."""

    async def main() -> None:
        network = LoopbackNetwork(link=link)
        server = LoopbackTransport(network, "peer")
        transport = LoopbackTransport(network, "client")
        scene = Scene(network, transport, Endpoint("peer", 1))
        listener = await server.listen("peer", 0, scene.serve)
        scene.endpoint = listener.endpoint
        await test(scene)
        await asyncio.sleep(60)
        assert repr(network).startswith("LoopbackNetwork(streams=0,"), network
        await server.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_opening_asks_for_the_span_of_the_hop_and_learns_of_the_load() -> None:
    async def test(scene: Scene) -> None:
        link, facts = await scene.open()

        assert facts.rtt_seconds == pytest.approx(0.1)
        assert (facts.queue_seconds, facts.free_kv_tokens) == (0.25, 77)
        assert scene.heard[0][1] == replace(OPEN, span=SPAN)
        assert link.session == SESSION
        await link.close()

    run(test, Link(delay_seconds=0.05))


def test_every_stream_says_under_which_name_it_counts() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        large = BULK_FRAME_BYTES // (4 * WIDTH) // 4 + 1
        await link.step(replace(make_step(), hidden=make_tensor(large, width=4 * WIDTH)), TIMEOUT)

        hellos = [heard[0] for heard in scene.heard]
        assert [hello.client for hello in hellos if isinstance(hello, Hello)] == [CLIENT, CLIENT]
        await link.close()

    run(test)


def test_hello_and_open_take_one_round_trip_together() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()

        # One for the connection, one for the rest.
        assert VirtualClock().now() == pytest.approx(0.2)
        await link.close()

    run(test, Link(delay_seconds=0.05))


def change(kind: type[Message], answer: Callable[[Any], Answer]) -> Script:
    """Return a script that is honest but for one kind of message."""
    return lambda message: answer(message) if type(message) is kind else answer_honestly(message)


def decline(code: ErrorCode, session: SessionId | None = SESSION) -> Callable[[Any], Answer]:
    return lambda _: Declined(session, 0, code, "no", None)


WELCOME = Welcome(1, "scripted", PEER_ID, MODEL_ID, SPAN, 0.0)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (change(Hello, lambda _: replace(WELCOME, peer_id=OTHER_ID)), RemoteProtocolError),
        (
            change(Hello, lambda _: replace(WELCOME, model_id=ModelId("b" * 32))),
            RemoteProtocolError,
        ),
        (change(Hello, lambda _: Opened(SESSION, 3, 0.0, 0)), RemoteProtocolError),
        (change(Hello, lambda _: b"HTTP/1.1 400 Bad Request"), RemoteProtocolError),
        (change(Hello, lambda _: None), UnavailableError),
        (change(Hello, decline(ErrorCode.BAD_VERSION, None)), RefusedError),
        (change(Open, lambda _: Opened(OTHER_SESSION, 3, 0.0, 0)), RemoteProtocolError),
        (change(Open, lambda _: WELCOME), RemoteProtocolError),
        (change(Open, lambda _: b""), RemoteProtocolError),
        (change(Open, lambda _: None), UnavailableError),
        (change(Open, decline(ErrorCode.BUSY)), RefusedError),
        (change(Open, decline(ErrorCode.CACHE_FULL)), CacheFullError),
        (change(Open, decline(ErrorCode.BUSY, OTHER_SESSION)), RemoteProtocolError),
        (change(Open, lambda _: Queued(SESSION, 3, 1.0)), RemoteProtocolError),
    ],
    ids=[
        "other peer",
        "other model",
        "no welcome",
        "other protocol",
        "hangs up",
        "version",
        "other session",
        "welcomes twice",
        "empty",
        "hangs up later",
        "busy",
        "full",
        "declines another",
        "queues who would not wait",
    ],
)
def test_opening_that_fails_says_whose_fault_it_is_and_leaves_nothing(
    script: Script, error: type[Exception]
) -> None:
    async def test(scene: Scene) -> None:
        scene.script = script

        with pytest.raises(error) as caught:
            await scene.open()

        assert type(caught.value) is error

    run(test)


@pytest.mark.parametrize("at", [Hello, Open])
def test_peer_that_falls_silent_while_opening_is_silent(at: type[Message]) -> None:
    async def test(scene: Scene) -> None:
        def pause(message: Message) -> Answer:
            if type(message) is at:
                scene.network.pause("peer")
            return answer_honestly(message)

        scene.script = pause
        with pytest.raises(SilentError, match=r"blocks 0:4"):
            await scene.open()
        assert VirtualClock().now() == pytest.approx(TIMEOUT)
        scene.network.resume("peer")

    run(test)


def test_opening_that_is_cancelled_leaves_nothing() -> None:
    async def test(scene: Scene) -> None:
        for seconds in (0.01, 0.06, 0.11, 0.16):  # dialling, accepted, greeting, opening
            opening = asyncio.create_task(scene.open())
            await asyncio.sleep(seconds)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening

    run(test, Link(delay_seconds=0.05))


def test_endpoints_are_tried_in_their_order() -> None:
    async def test(scene: Scene) -> None:
        dead = Endpoint("peer", 9)

        link, _ = await scene.open(scene.make_hop(dead, scene.endpoint))
        await link.close()
        with pytest.raises(UnavailableError, match="connection refused"):
            await scene.open(scene.make_hop(dead))

    run(test)


class PickyTransport(LoopbackTransport):
    """Turns endpoints down like gRPC does without a fingerprint."""

    async def open_stream(
        self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
    ) -> Any:
        if not endpoint.fingerprint:
            raise UsageError(f"{endpoint} has no TLS fingerprint and is not a loopback address")
        return await super().open_stream(endpoint, lane, timeout_seconds)


def test_endpoint_that_must_not_be_dialled_is_the_fault_of_its_announcement() -> None:
    async def test(scene: Scene) -> None:
        scene.transport = PickyTransport(scene.network, "client")
        bare = Endpoint("example.org", 80)

        link, _ = await scene.open(scene.make_hop(bare, scene.endpoint))
        await link.close()
        with pytest.raises(RemoteProtocolError, match="cannot be used"):
            await scene.open(scene.make_hop(bare))

    run(test)


def test_announcement_without_endpoints_is_its_peers_fault() -> None:
    async def test(scene: Scene) -> None:
        hop = Hop(make_announcement(()), SPAN)

        with pytest.raises(RemoteProtocolError, match="no endpoint"):
            await scene.open(hop)

    run(test)


def test_step_returns_the_answer_to_it() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        step = make_step(3, sequence=9)

        assert await link.step(step, TIMEOUT) == make_output(step)

        await link.close()

    run(test)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda step: make_output(step, session=OTHER_SESSION), RemoteProtocolError),
        (lambda step: make_output(step, sequence=8), RemoteProtocolError),
        (lambda step: make_output(step, hidden=make_tensor(2)), RemoteProtocolError),
        (lambda step: make_output(step, hidden=make_tensor(3, rows=2)), RemoteProtocolError),
        (lambda step: make_output(step, hidden=make_tensor(3, width=9)), RemoteProtocolError),
        (
            lambda step: make_output(step, hidden=make_tensor(3, dtype=WireDtype.BF16)),
            RemoteProtocolError,
        ),
        (lambda _: Opened(SESSION, 3, 0.0, 0), RemoteProtocolError),
        (lambda _: WELCOME, RemoteProtocolError),
        (lambda step: encode_frame(make_output(step))[:-1], RemoteProtocolError),
        (lambda _: b"\x00" * 60, RemoteProtocolError),
        (decline(ErrorCode.BAD_VALUES, OTHER_SESSION), RemoteProtocolError),
        (decline(ErrorCode.BAD_VALUES), RefusedError),
        (decline(ErrorCode.INTERNAL, None), RefusedError),
        (decline(ErrorCode.CACHE_FULL), CacheFullError),
        (lambda step: Gap(step.session, step.epoch, step.sequence, 0), UnavailableError),
        (lambda _: None, UnavailableError),
    ],
    ids=[
        "session",
        "sequence",
        "tokens",
        "rows",
        "width",
        "dtype",
        "opened",
        "welcome",
        "cut",
        "zeros",
        "declines another",
        "bad values",
        "declines the stream",
        "full",
        "gap",
        "hangs up",
    ],
)
def test_answer_that_does_not_fit_the_question(
    answer: Callable[[Step], Answer], error: type[Exception]
) -> None:
    async def test(scene: Scene) -> None:
        scene.script = change(Step, answer)
        link, _ = await scene.open()

        with pytest.raises(error) as caught:
            await link.step(make_step(3, sequence=9), TIMEOUT)

        assert type(caught.value) is error
        await link.close()

    run(test)


def test_last_token_only_expects_one_token() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        with pytest.raises(RemoteProtocolError):
            await link.step(make_step(3, last_token_only=True), TIMEOUT)
        await link.close()

        scene.script = change(Step, lambda step: make_output(step, hidden=make_tensor(1)))
        link, _ = await scene.open()
        answer = await link.step(make_step(3, last_token_only=True), TIMEOUT)
        assert answer.hidden.tokens == 1
        await link.close()

    run(test)


def test_peer_that_falls_silent_is_waited_for_no_longer_than_asked() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        scene.network.pause("peer")

        with pytest.raises(SilentError, match=r"did not answer within 2\.5 s"):
            await link.step(make_step(), 2.5)

        assert VirtualClock().now() == pytest.approx(2.5)
        await link.close()
        scene.network.resume("peer")

    run(test)


def test_large_steps_take_the_bulk_lane_and_small_ones_do_not() -> None:
    lanes: list[Lane] = []

    class NotingTransport(LoopbackTransport):
        async def open_stream(
            self, endpoint: Endpoint, lane: Lane = Lane.INTERACTIVE, timeout_seconds: float = 5.0
        ) -> Any:
            lanes.append(lane)
            return await super().open_stream(endpoint, lane, timeout_seconds)

    async def test(scene: Scene) -> None:
        scene.transport = NotingTransport(scene.network, "client")
        link, _ = await scene.open()
        large = BULK_FRAME_BYTES // (4 * WIDTH) // 4 + 1

        wide = replace(make_step(), hidden=make_tensor(large, width=4 * WIDTH))
        for step in (make_step(), wide, wide, make_step()):
            await link.step(step, TIMEOUT)

        assert lanes == [Lane.INTERACTIVE, Lane.BULK]
        assert [type(message) for message in scene.heard[1]] == [Hello, Step, Step]
        assert [type(message) for message in scene.heard[0]] == [Hello, Open, Step, Step]
        await link.close()

    run(test)


def test_bulk_lane_has_to_lead_to_the_same_peer() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        scene.script = change(Hello, lambda _: replace(WELCOME, peer_id=OTHER_ID))
        large = make_step(BULK_FRAME_BYTES // (4 * WIDTH) // 2)
        large = replace(large, hidden=make_tensor(large.hidden.tokens, width=4 * WIDTH))

        with pytest.raises(RemoteProtocolError, match="another peer"):
            await link.step(large, TIMEOUT)

        await link.close()

    run(test)


def test_closing_says_so() -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        await link.close()
        await link.close()
        await asyncio.sleep(1)

        assert scene.heard[0][-1] == Close(SESSION, 3)

    run(test)


@pytest.mark.parametrize("trouble", ["kill", "pause"])
def test_closing_never_raises_nor_waits_for_a_peer_in_trouble(trouble: str) -> None:
    async def test(scene: Scene) -> None:
        link, _ = await scene.open()
        getattr(scene.network, trouble)("peer")

        await link.close()

        assert VirtualClock().now() < 5
        scene.network.kill("peer")

    run(test)


class StuckStream:
    """A stream that has no room for another frame, and never will."""

    is_closed = False
    remote_host = None

    async def send(self, frame: bytes) -> None:
        await asyncio.Event().wait()

    async def receive(self) -> bytes | None:
        return await asyncio.Event().wait() and None

    async def close(self) -> None:
        self.is_closed = True


def test_closing_does_not_wait_for_a_stream_that_is_stuck() -> None:
    async def test(scene: Scene) -> None:
        stream = StuckStream()
        link = HopLink(scene.transport, VirtualClock(), scene.make_hop(), OPEN, CLIENT, stream)

        await link.close()

        assert stream.is_closed
        assert VirtualClock().now() < 5

    run(test)
