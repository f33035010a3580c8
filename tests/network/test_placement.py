"""Peers that choose their blocks, as real processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE_SECONDS = 120.0
FIRST, LAST = Span(0, 2), Span(2, 4)


def test_peers_spread_and_close_a_gap_while_a_session_goes_on(tiny_models: Any) -> None:
    """Two of three peers have the same blocks; the one that is alone with others dies."""
    tiny = tiny_models.get("llama")
    prompt = torch.arange(3, 15).reshape(1, -1)
    expected = tiny.reference.generate(prompt, **count(24))
    with LocalSwarm(
        tiny.directory, spans=[2], weights="fp32", announce_period_seconds=2.0
    ) as swarm:
        for _ in range(2):  # those that come at once may choose the same place, and then any
            swarm.add(2)
        by_span = sort_by_span(swarm)
        assert sorted(len(peers) for peers in by_span.values()) == [1, 2]
        (lone,), replicas = sorted(by_span.values(), key=len)
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers
        )
        with model:
            with model.inference_session(max_length=64):
                begun = model.generate(prompt, **count(8))
                lone.kill()
                wait_for_mover(replicas, lone.span)
                rest = model.generate(**count(16))
            assert torch.equal(torch.cat([begun, rest], dim=1), expected)
            assert torch.equal(model.generate(prompt, **count(24)), expected)
        assert sorted(peer.span for peer in replicas) == [FIRST, LAST]
        assert "Traceback" not in "".join(peer.log() for peer in replicas)


def count(num_tokens: int) -> dict[str, Any]:
    """Return options for that many tokens, the likeliest ones."""
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}


def sort_by_span(swarm: LocalSwarm) -> dict[Span, list[LocalPeer]]:
    by_span: dict[Span, list[LocalPeer]] = {FIRST: [], LAST: []}
    for peer in swarm.peers:
        by_span[peer.span].append(peer)
    return by_span


def wait_for_mover(peers: list[LocalPeer], gap: Span) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while gap not in [peer.span for peer in peers]:
        assert time.monotonic() < deadline, [peer.log() for peer in peers]
        time.sleep(0.05)
