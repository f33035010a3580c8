"""What a client asks of the peer that trains an adapter, each once.

All of it raises UnavailableError, RefusedError or RemoteProtocolError.
"""

from __future__ import annotations

from ...protocol.adapter_messages import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterUpdate,
)
from ...protocol.errors import RemoteProtocolError
from ..router import Hop
from .pass_asking import PassAsker

_PATIENCE_SECONDS = 60.0
"""What is asked waits for passes of others, and says so meanwhile."""

_PATIENCE = 2.0
"""An adapter may take so many times what its line is expected to take."""


async def bring(asker: PassAsker, hop: Hop, head: AdapterHead, data: bytes) -> None:
    """Have a peer train an adapter from now on."""
    async with asker.lend(hop) as (link, way):
        await asker.courier.send(link, head, data, way)


async def measure(asker: PassAsker, hop: Hop, asked: AdapterMeasure) -> float:
    """Return the sum of the squares of what a peer has gathered."""
    async with asker.lend(hop) as (link, _):
        answer = await link.ask_about_adapter(asked, _PATIENCE_SECONDS)
        if not isinstance(answer, AdapterMeasured):
            raise RemoteProtocolError(f"a peer answered a question with {answer!r:.80}")
        return answer.square_sum


async def update(asker: PassAsker, hop: Hop, asked: AdapterUpdate) -> None:
    """Have a peer make an update."""
    async with asker.lend(hop) as (link, _):
        answer = await link.ask_about_adapter(asked, _PATIENCE_SECONDS)
        if not isinstance(answer, AdapterKept):
            raise RemoteProtocolError(f"a peer answered an update with {answer!r:.80}")


async def fetch(
    asker: PassAsker, hop: Hop, asked: AdapterFetch, most_bytes: int
) -> tuple[AdapterHead, bytes]:
    """Return what a peer has made of an adapter, which is no more than so many bytes."""
    async with asker.lend(hop) as (link, way):
        with asker.line.carry(most_bytes) as carrying_seconds:
            carrying_seconds = min(carrying_seconds, way.expect_seconds(asker.line.num_bytes))
            patience_seconds = _PATIENCE_SECONDS + _PATIENCE * carrying_seconds
            return await link.fetch_adapter(asked, most_bytes, carrying_seconds, patience_seconds)
