"""A client that publishes adapters at scripted peers, on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import torch
from async_tests import make_decorator
from pass_peers import WHOLE, PassPeer, make_asker
from session_scene import NUM_BLOCKS, SessionScene, run

from shoal.client.adapters.adapter_versions import AdapterLeaves, AdapterVersion
from shoal.client.publishing.publisher import Publisher
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.adapters import KEEP_SECONDS, LoraConfig
from shoal.protocol.net.memory.loopback import Link

SECONDS = 1.1 * KEEP_SECONDS / 3
"""A little longer than between two renewals."""

LARGE = 2**20
"""Numbers of an adapter of 4 MiB in each block."""


def make_leaves(num_numbers: int = 8) -> AdapterLeaves:
    """Return an adapter with so many numbers in each block, another one for each number."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
    matrix = torch.ones(2, num_numbers // 2)
    matrices = {name.format(block): matrix for block in range(NUM_BLOCKS)}
    leaves = AdapterVersion(LoraConfig(2, 4), matrices, False, "", 0).publish(WHOLE)
    assert leaves is not None
    return leaves


def name_of(leaves: AdapterLeaves) -> AdapterId:
    """Return what peers call it."""
    return leaves.manifest.name


def count_uploads(peer: PassPeer) -> Counter[AdapterId]:
    """Return how often a peer was sent each adapter."""
    assert all(head.is_published for head in peer.brought)
    return Counter(head.adapter for head in peer.brought)


async def run_publisher(
    test: Callable[[SessionScene, Publisher], Awaitable[None]], link: Link | None = None
) -> None:
    """Run a test with a client that publishes, and close all of it."""

    async def main(scene: SessionScene) -> None:
        asker = make_asker(scene)
        publisher = Publisher(asker)
        await test(scene, publisher)
        await publisher.close()
        await asker.close()

    await run(main, link)


with_publisher = make_decorator(run_publisher, 2)
