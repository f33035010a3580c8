# pyright: reportAttributeAccessIssue=false
"""What a peer takes from a p2pd that answers oddly about who it is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from shoal.protocol.net.relays import circuit
from shoal.protocol.net.relays.circuit import RelayReservations

pytestmark = pytest.mark.network

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def refuse(writer: asyncio.StreamWriter) -> None:
    error = p2pd_pb2.ErrorResponse(msg="not now")
    await write_pbmsg(writer, p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=error))


async def stay_silent(writer: asyncio.StreamWriter) -> None:
    """Leave the question unanswered."""


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("answer", [refuse, stay_silent, hang_up])
async def test_p2pd_that_does_not_say_who_is_connected_has_nobody(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "ANSWER_SECONDS", 0.2)
    path, has_ended = tmp_path / "p2pd", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_pbmsg_safe(reader, p2pd_pb2.Request())
        await answer(writer)
        await reader.read()  # until the other end has closed
        writer.close()
        await writer.wait_closed()
        has_ended.set()

    async with await asyncio.start_unix_server(serve, path):
        connector = DaemonConnector(Multiaddr(f"/unix{path}"))
        client = Client(_initialized_with_create=True)
        client.control = await ControlClient.create(connector, use_persistent_conn=False)
        reservations = RelayReservations(cast(Any, SimpleNamespace(_client=client)))
        async with asyncio.timeout(20.0):
            assert await reservations.list_connected() == set()
            await has_ended.wait()
