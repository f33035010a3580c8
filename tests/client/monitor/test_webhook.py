"""The webhook against servers that answer, redirect, refuse and hang."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from announcements import MODEL, NOW
from hand_clock import HandClock

from shoal.client.monitor.alerts import Alert
from shoal.client.monitor.webhook import Webhook
from shoal.protocol.errors import UsageError
from shoal.protocol.ids import PeerId
from shoal.protocol.net.retry import Backoff
from shoal.protocol.net.tasks import cancel_all

pytestmark = pytest.mark.real_loop  # of sockets


def make_alert(number: int) -> Alert:
    return Alert(NOW + number, "model failing", MODEL, "org/model", PeerId(""), f"text {number}")


class Receiver:
    """A web server that gives one answer, and what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.url = ""
        self.asked: asyncio.Queue[tuple[str, dict[str, object]]] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        self.asked.put_nowait((head.splitlines()[0], json.loads(await reader.readexactly(length))))
        writer.write(self.answer)
        if not self.answer:
            await reader.read()  # until it hangs up
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def receiving(answer: bytes) -> AsyncIterator[Receiver]:
    receiver = Receiver(answer)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    receiver.url = f"http://127.0.0.1:{port}/secret"
    async with server:
        yield receiver


async def test_alerts_arrive_as_json_in_their_order() -> None:
    async with receiving(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n") as receiver:
        webhook = Webhook(receiver.url, HandClock(NOW))
        webhook.put([make_alert(1), make_alert(2)])
        posting = asyncio.create_task(webhook.run())

        asked = [await receiver.asked.get() for _ in range(2)]

        await cancel_all([posting])
    assert [line for line, _ in asked] == ["POST /secret HTTP/1.1"] * 2
    assert [body["text"] for _, body in asked] == ["text 1", "text 2"]
    assert asked[0][1] == {
        "at": NOW + 1,
        "kind": "model failing",
        "model_id": MODEL,
        "model": "org/model",
        "peer_id": "",
        "text": "text 1",
    }
    assert webhook.error == ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "is not followed"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n", "it answers 500"),
        (b"no HTTP\r\n\r\n", ""),
        (b"", "it does not answer within 0.2 s"),
    ],
    ids=["redirects", "refuses", "says something else", "hangs"],
)
async def test_alerts_that_do_not_arrive_are_told(answer: bytes, reason: str) -> None:
    async with receiving(answer) as receiver:
        webhook = Webhook(receiver.url, HandClock(NOW), 60.0 if answer else 0.2, Backoff(0.0, 0.0))
        webhook.put([make_alert(1)])
        posting = asyncio.create_task(webhook.run())
        for _ in range(2):  # before it tries again it knows
            await receiver.asked.get()

        await cancel_all([posting])
    assert webhook.error.startswith("the webhook at 127.0.0.1 gets no alerts: ")
    assert webhook.error.endswith(reason)
    assert "secret" not in webhook.error


async def test_alert_is_posted_again_and_its_failure_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with receiving(b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n") as receiver:
        webhook = Webhook(receiver.url, HandClock(NOW), backoff=Backoff(0.0, 0.0))
        webhook.put([make_alert(1), make_alert(2)])
        posting = asyncio.create_task(webhook.run())

        asked = [await receiver.asked.get() for _ in range(3)]
        receiver.answer = b"HTTP/1.1 204 x\r\n\r\n"
        while asked[-1][1]["text"] == "text 1":
            asked.append(await receiver.asked.get())

        await cancel_all([posting])
    assert [body["text"] for _, body in asked[:3]] == ["text 1"] * 3
    assert [record.message for record in caplog.records] == [
        "the webhook at 127.0.0.1 gets no alerts: it answers 500"
    ]


async def test_newest_alerts_are_kept() -> None:
    async with receiving(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n") as receiver:
        webhook = Webhook(receiver.url, HandClock(NOW))
        webhook.put(map(make_alert, range(1000)))
        posting = asyncio.create_task(webhook.run())

        _, body = await receiver.asked.get()

        await cancel_all([posting])
    assert body["text"] == "text 900"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "https://", "ftp://host/", "host", ""])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="webhook"):
        Webhook(url, HandClock(NOW))
