"""Links to peers: an upload on a stream that breaks, and a link that is lent out at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from announcements import describe_peer
from virtual_time import VirtualClock, run_virtual

from shoal.client.passes.pass_links import PassLink, PassLinks
from shoal.protocol.errors import ErrorCode, RefusedError, UnavailableError
from shoal.protocol.ids import NO_ADAPTER, AdapterId, ModelId, PeerId, SessionId, UploadId
from shoal.protocol.messages.adapters import AdapterHead
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.messages.session import Declined
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import FrameGate
from shoal.protocol.spans import Span

UPLOAD = UploadId(SessionId(b"an upload of it."))


class BreakingStream:
    """Takes one frame and breaks with the next one; something is heard before."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self._num_sent = 0
        self._is_full = asyncio.Event()
        self.remote_host = None

    def set_gate(self, gate: FrameGate) -> None: ...

    async def send(self, frame: bytes) -> None:
        self._num_sent += 1
        if self._num_sent > 1:
            self._is_full.set()
            await asyncio.sleep(1.0)
            raise UnavailableError("it broke")

    async def receive(self) -> bytes | None:
        await self._is_full.wait()
        return self._said

    async def wait_over(self) -> None: ...

    async def close(self) -> None: ...


def make_link(said: bytes) -> PassLink:
    facts: dict[str, Any] = {"peer_id": PeerId("a" * 64), "model_id": ModelId("a" * 32)}
    times = {"issued_at": 0.0, "expires_at": 600.0}
    peer = describe_peer(num_blocks=6, span=Span(0, 6), **facts, **times)
    return PassLink(VirtualClock(), peer, BreakingStream(said))


async def bring_adapter(said: bytes) -> None:
    """Bring an adapter on such a stream."""
    link = make_link(said)
    head = AdapterHead(UPLOAD, AdapterId(bytes(32)), b"{}", 8, True, NO_ADAPTER)
    await link.bring(head, bytes(8), 1.0, 20.0)


def test_refusal_is_raised_though_the_stream_breaks_behind_it() -> None:
    declined = Declined(UPLOAD, 0, ErrorCode.NO_ROOM_FOR_ADAPTER, "as the test says")

    with pytest.raises(RefusedError, match="as the test says"):
        run_virtual(bring_adapter(encode_frame(declined)))


def test_link_that_is_lent_out_when_all_are_closed_is_not_kept() -> None:
    async def test() -> None:
        links = PassLinks(
            LoopbackTransport(LoopbackNetwork(), "home"), VirtualClock(), bytes(16), 5.0
        )
        link = make_link(b"")
        links._idle[link.peer.peer_id] = [link]
        async with links.lend(link.peer, lambda: True) as lent:
            assert lent is link
            await links.close()
        assert "0 in use, 0 idle" in repr(links)

    run_virtual(test())
