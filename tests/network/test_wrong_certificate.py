"""A peer announces another TLS certificate than it shows: whoever answers there is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.client import AutoDistributedModelForCausalLM, RouteError
from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm
from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

FORGED = (str(Path(__file__).with_name("forged_peer.py")),)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture
def swarm(tiny_models: Any) -> Iterator[LocalSwarm]:
    with LocalSwarm(tiny_models.get().directory, spans=[(0, 2)], weights="fp32") as swarm:
        yield swarm


@pytest.fixture
def liar(swarm: LocalSwarm) -> LocalPeer:
    """The only peer of the other half."""
    return swarm.add((2, 4), program=FORGED)


def test_liar_is_left_out_and_its_replica_tells_the_right_words(
    swarm: LocalSwarm, liar: LocalPeer, tiny_models: Any
) -> None:
    tiny = tiny_models.get()
    prompt = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(5))
    expected = tiny.reference.generate(prompt, **GREEDY)

    def connect(seed: int, **settings: Any) -> Any:
        return AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, initial_peers=swarm.initial_peers, seed=seed, **settings
        )

    with connect(0, failover_timeout_seconds=2.0) as model:
        with pytest.raises(RouteError) as caught:
            model.generate(prompt, **GREEDY)
        assert caught.value.missing == (Span(2, 4),)
        assert "2:4" in str(caught.value)
        assert "\n" not in str(caught.value)

    replica = swarm.add((2, 4))
    for seed in range(4):  # whichever of the two is tried first
        with connect(seed) as model, model.inference_session(max_length=64) as session:
            assert torch.equal(model.generate(prompt, **GREEDY), expected)
            assert session.hops[1].peer.peer_id == replica.peer_id
    assert liar.is_running
