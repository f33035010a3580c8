"""A canary names peers that are killed at once, in the run that loses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from announcements import NOW
from transformers import AutoTokenizer

from shoal.cli.monitoring.canary_process import measure_text
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.monitor.canary import CanaryRun, CanaryState, read_answer, reduce_run
from shoal.client.monitor.description import describe_canaries
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import RouteError
from shoal.protocol.ids import PeerId

STORIES = Path(__file__).resolve().parents[3] / "models" / "shoal-stories"


class Scene:
    """A swarm in this process whose last blocks have two peers, and what a canary runs over it."""

    def __init__(self, swarm: LoopbackSwarm, model: Any) -> None:
        self.swarm = swarm
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(STORIES)

    def run(self, kills_meanwhile: bool = False) -> CanaryRun:
        """Return a run as the monitor reads it; the last hop may be killed during it."""
        sessions, pieces = list[Any](), list[str]()

        def hear(piece: str) -> None:
            pieces.append(piece)
            if kills_meanwhile and len(pieces) == 3:
                self.kill(sessions[0].hops[-1].peer.peer_id)

        facts = measure_text(self._model, self._tokenizer, sessions.append, hear)
        return read_answer(json.dumps({"model_id": "", **facts}).encode(), NOW)

    def kill(self, peer_id: PeerId) -> None:
        self.swarm.network.kill(self.swarm.find(peer_id).host)


@pytest.fixture
def scene() -> Iterator[Scene]:
    swarm = LoopbackSwarm(STORIES, [(0, 4), (4, 8), (4, 8)])
    with AutoDistributedModelForCausalLM.from_pretrained(
        STORIES, connect=swarm.connect, failover_timeout_seconds=0.5
    ) as model:
        yield Scene(swarm, model)


def test_canary_names_a_peer_that_is_killed_during_its_run(scene: Scene) -> None:
    first = scene.run()

    run = scene.run(kills_meanwhile=True)

    state, events = reduce_run(reduce_run(CanaryState("stories"), first, 8)[0], run, 8)
    (panel,) = describe_canaries([state], NOW)
    (failover,) = panel.failovers
    assert "[4:8] " in failover
    assert "took over" in failover
    assert (panel.health, panel.is_same, first.failovers, events) == ("healthy", True, (), ())


def test_canary_goes_on_without_a_killed_peer_in_its_next_run_and_fails_without_the_last(
    scene: Scene,
) -> None:
    first = scene.run()
    lost = first.hops[-1].peer_id
    scene.kill(lost)

    second = scene.run()

    assert lost not in [hop.peer_id for hop in second.hops]
    assert second.text == first.text
    scene.kill(second.hops[-1].peer_id)
    with pytest.raises(RouteError, match="4:8"):
        scene.run()
