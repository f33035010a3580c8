"""One hop on the wire, against scripted peers on the loopback network and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hop_scene import (
    CLIENT,
    IN_CHAIN,
    OPEN,
    OTHER_ID,
    OTHER_SESSION,
    SESSION,
    TIMEOUT,
    WELCOME,
    Answer,
    Scene,
    ask,
    change,
    decline,
    in_scene,
    make_bulk_step,
    make_output,
    make_step,
    make_tensor,
)
from virtual_time import VirtualClock

from shoal.client.session.hop_link import GapError, HopLink
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    CacheFullError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    StaleAnnouncementError,
    UnavailableError,
)
from shoal.protocol.messages.session import (
    Attach,
    Close,
    Gap,
    Hello,
    Open,
    Opened,
    Step,
)
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.net.transport import FrameGate
from shoal.protocol.tensors import WireDtype
from shoal.protocol.wire.codec import encode_frame


@in_scene()
async def test_step_returns_the_answer_to_it(scene: Scene) -> None:
    link, _ = await scene.open()
    step = make_step(3, sequence=9)

    assert await ask(link, step, TIMEOUT) == make_output(step)

    await link.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda step: make_output(step, session=OTHER_SESSION), RemoteProtocolError),
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
        (lambda step: Gap(step.session, step.epoch, step.sequence, 0), GapError),
        (lambda _: None, UnavailableError),
    ],
    ids=[
        "session",
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
@in_scene()
async def test_answer_that_does_not_fit_the_question(
    scene: Scene, answer: Callable[[Step], Answer], error: type[Exception]
) -> None:
    scene.script = change(Step, answer)
    link, _ = await scene.open()

    with pytest.raises(error) as caught:
        await ask(link, make_step(3, sequence=9), TIMEOUT)

    assert type(caught.value) is error
    await link.close()


@in_scene()
async def test_last_token_only_expects_one_token(scene: Scene) -> None:
    link, _ = await scene.open()
    with pytest.raises(RemoteProtocolError):
        await ask(link, make_step(3, last_token_only=True), TIMEOUT)
    await link.close()

    scene.script = change(Step, lambda step: make_output(step, hidden=make_tensor(1)))
    link, _ = await scene.open()
    answer = await ask(link, make_step(3, last_token_only=True), TIMEOUT)
    assert answer.hidden.tokens == 1
    await link.close()


@in_scene()
async def test_large_steps_of_a_chain_take_a_second_stream(scene: Scene) -> None:
    dialled: list[Endpoint] = []

    class NotingTransport(LoopbackTransport):
        async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> Any:
            dialled.append(endpoint)
            return await super().open_stream(endpoint, timeout_seconds)

    scene.transport = NotingTransport(scene.network, "client")
    for opening in (OPEN, IN_CHAIN):
        link, _ = await scene.open(opening=opening)
        for step in (make_step(), make_bulk_step(), make_bulk_step(), make_step()):
            await link.send(step, TIMEOUT)
        await asyncio.sleep(1)
        await link.close()
    await asyncio.sleep(1)

    kinds = [[type(message) for message in heard] for heard in scene.heard]
    assert kinds == [
        [Hello, Open, Step, Step, Step, Step, Close],
        [Hello, Open, Step, Step, Close],
        [Hello, Attach, Step, Step],
    ]
    assert len(dialled) == 3


@in_scene()
async def test_second_stream_has_to_lead_to_the_same_peer(scene: Scene) -> None:
    link, _ = await scene.open(opening=IN_CHAIN)
    scene.script = change(Hello, lambda _: replace(WELCOME, peer_id=OTHER_ID))

    with pytest.raises(StaleAnnouncementError, match="another peer"):
        await ask(link, make_bulk_step(), TIMEOUT)

    await link.close()


@in_scene()
async def test_closing_says_so(scene: Scene) -> None:
    link, _ = await scene.open()
    await link.close()
    await link.close()
    await asyncio.sleep(1)

    assert scene.heard[0][-1] == Close(SESSION, 3)


@pytest.mark.parametrize("trouble", ["kill", "pause"])
@in_scene()
async def test_closing_never_raises_nor_waits_for_a_peer_in_trouble(
    scene: Scene, trouble: str
) -> None:
    link, _ = await scene.open()
    getattr(scene.network, trouble)("peer")

    await link.close()

    assert VirtualClock().now() < 5
    scene.network.kill("peer")


class StuckStream:
    """A stream that has no room for another frame, and never will."""

    is_closed = False
    remote_host = None

    async def send(self, frame: bytes) -> None:
        await asyncio.Event().wait()

    def set_gate(self, gate: FrameGate) -> None:
        return

    async def wait_over(self) -> None:
        await asyncio.Future[None]()

    async def receive(self) -> bytes | None:
        return await asyncio.Event().wait() and None

    async def close(self) -> None:
        self.is_closed = True


@in_scene()
async def test_closing_does_not_wait_for_a_stream_that_is_stuck(scene: Scene) -> None:
    stream = StuckStream()
    link = HopLink(scene.transport, VirtualClock(), scene.make_hop(), OPEN, CLIENT, stream)

    await link.close()

    assert stream.is_closed
    assert VirtualClock().now() < 5
