"""The last peer of some blocks is gone: the client says so within the time it was given.

Real services and engines on virtual time, so that what is measured is the client's own patience
and no machine's speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from virtual_swarm import PERIOD_SECONDS, VirtualSwarm, draw, run_scene
from virtual_time import VirtualClock

from shoal.client.settings.client_config import ClientConfig
from shoal.protocol.errors import RouteError
from shoal.protocol.net.memory.loopback import LoopbackNetwork
from shoal.protocol.spans import Span

SPANS = {"first": Span(0, 2), "last": Span(2, 4)}
PATIENCE_SECONDS = 7.0
CONFIG = ClientConfig(seed=0, failover_timeout_seconds=PATIENCE_SECONDS)
EXPIRY_SECONDS = 4 * PERIOD_SECONDS
SLACK_SECONDS = 2 * CONFIG.connect_timeout_seconds
"""The attempt that is under way when the time is over may end, at the network and at the DHT."""


@pytest.mark.parametrize("host", SPANS)
@pytest.mark.parametrize("trouble", [LoopbackNetwork.kill, LoopbackNetwork.pause])
@pytest.mark.parametrize("num_tokens", [1, 9], ids=["token", "prompt"])
def test_last_replica_that_is_gone_is_named_in_time(
    tiny_models: Any, host: str, trouble: Callable[[LoopbackNetwork, str], None], num_tokens: int
) -> None:
    async def story(scene: VirtualSwarm) -> None:
        for name, span in SPANS.items():
            await scene.add(name, span)
        session = await scene.join("client")
        await session.step(draw(1, 5))
        trouble(scene.network, host)
        asked_at = VirtualClock().now()

        with pytest.raises(RouteError) as caught:
            await session.step(draw(2, num_tokens))

        seconds = VirtualClock().now() - asked_at
        assert PATIENCE_SECONDS <= seconds <= PATIENCE_SECONDS + SLACK_SECONDS
        assert caught.value.missing == (SPANS[host],)
        assert session.position == 5

    run_scene(tiny_models.get().directory, CONFIG, story)


@pytest.mark.parametrize("is_expired", [True, False], ids=["expired", "announced"])
def test_other_blocks_that_nobody_serves_any_more_are_named_as_well(
    tiny_models: Any, is_expired: bool
) -> None:
    """Failover looks for the hop that was lost first; whoever starts peers wants to know all."""

    async def story(scene: VirtualSwarm) -> None:
        for name, span in SPANS.items():
            await scene.add(name, span)
        session = await scene.join("client")
        await session.step(draw(1, 5))
        scene.network.kill("last")
        if is_expired:
            scene.network.kill("first")
        await asyncio.sleep(EXPIRY_SECONDS)
        scene.network.kill("first")

        with pytest.raises(RouteError) as caught:
            await session.step(draw(2, 1))

        gaps = (Span(0, 4),) if is_expired else tuple(SPANS.values())
        assert caught.value.missing == gaps
        assert all(str(span) in str(caught.value) for span in gaps)

    run_scene(tiny_models.get().directory, replace(CONFIG, delivery="star"), story)
