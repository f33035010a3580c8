"""A client that publishes adapters at scripted peers, on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from pass_peers import WHOLE, PassPeer, make_adapted_texts, make_asker
from session_scene import Scene, run

from shoal.client.adapters.adapter_versions import AdapterVersion
from shoal.client.passes.pass_asking import PassAsker
from shoal.client.publishing.publisher import Publisher
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.adapters import KEEP_SECONDS
from shoal.protocol.net.clock import VirtualClock
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.records.announcements import Announcement

SECONDS = 1.1 * KEEP_SECONDS / 3
"""A little longer than between two renewals."""

LARGE = 2**22
"""Numbers of an adapter of 16 MiB: 342 pieces, of which the network takes 85 by itself."""


def make_version(num_numbers: int) -> AdapterVersion:
    """Return a state of an adapter, another one for each number of numbers."""
    (adapter,) = make_adapted_texts(num_numbers).adapters
    assert isinstance(adapter, AdapterVersion)
    return adapter.publish()


def name_of(version: AdapterVersion) -> AdapterId:
    """Return what peers call it."""
    cut = version.cut(WHOLE)
    assert cut is not None
    return cut.name


def count_heads(peer: PassPeer) -> Counter[AdapterId]:
    """Return how often a peer heard of each adapter."""
    assert all(head.is_published for head in peer.brought)
    return Counter(head.adapter for head in peer.brought)


async def begin_late(
    asker: PassAsker, publisher: Publisher, version: AdapterVersion, lineage: str
) -> asyncio.Task[None]:
    """Begin to publish something; that call alone hears of peers three seconds later."""
    list_peers = asker.list_peers

    async def list_late() -> list[Announcement]:
        await asyncio.sleep(3.0)
        return await list_peers()

    asker.list_peers = list_late
    publishing = asyncio.create_task(publisher.publish(version, WHOLE, lineage))
    await asyncio.sleep(1.0)
    asker.list_peers = list_peers
    return publishing


def run_publisher(
    test: Callable[[Scene, PassAsker, Publisher], Awaitable[None]], link: Link | None = None
) -> None:
    """Run a test with somebody who publishes, and close all of it."""

    async def main(scene: Scene) -> None:
        asker = make_asker(scene)
        publisher = Publisher(asker, VirtualClock())
        await test(scene, asker, publisher)
        await publisher.close()
        await asker.close()

    run(main, link)
