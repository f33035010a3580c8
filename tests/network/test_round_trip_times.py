"""Peers that measure each other, as real processes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE_SECONDS = 90.0


def test_peers_announce_how_far_they_are_from_each_other(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    spans = [(0, 2), (2, 4)]
    with LocalSwarm(directory, spans, weights="fp32", announce_period_seconds=1.0) as swarm:
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            directory, initial_peers=swarm.initial_peers
        )
        with model:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                peers = model._client.view_swarm().online
                if len(peers) == 2 and all(peer.rtts and peer.coordinate for peer in peers):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.5)

    one, other = peers
    assert [peer_id for peer_id, _ in one.rtts] == [other.peer_id]
    assert [peer_id for peer_id, _ in other.rtts] == [one.peer_id]
    assert "Traceback" not in "".join(peer.log() for peer in swarm.peers)
