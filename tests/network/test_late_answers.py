# pyright: reportAttributeAccessIssue=false
"""Answers of p2pd to those who give up waiting in the same moment. Starts a real p2pd."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from shoal.protocol.net.libp2p.p2p_daemon import start_reading_p2pd, stop_p2pd

pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SOMEBODY = PeerID(bytes(34))
ANSWER = p2pd_pb2.CallUnaryResponse(response=b"late")
FAILURE = p2pd_pb2.DaemonError(message="late")


def encode(message: Any) -> bytes:
    text = message.SerializeToString()
    assert len(text) < 128, "one byte says how long it is"
    return bytes([len(text)]) + text


@pytest.mark.parametrize("late", [{"callUnaryResponse": ANSWER}, {"daemonError": FAILURE}])
async def test_answer_to_one_who_gives_up_just_now_deafens_nobody(late: dict[str, Any]) -> None:
    p2p: Any = await start_reading_p2pd([], None)
    try:
        control = p2p._client.control
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(control._read_from_persistent_conn(reader))
        asking = asyncio.create_task(control.call_unary_handler(SOMEBODY, "nothing", b""))
        while not control._pending_calls:  # noqa: ASYNC110 - hivemind sets no event
            await asyncio.sleep(0)
        (call_id,) = control._pending_calls

        reader.feed_data(
            encode(p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, **late))
        )
        asking.cancel()  # before anybody has read that

        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not reading.done()
        reader.feed_eof()
        await reading
    finally:
        await stop_p2pd(p2p)
