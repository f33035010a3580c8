"""Hidden states that travel in int8: through every delivery, and through kills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import RouteError
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.versions import INT8_VERSION

SEED = 11
SPANS = [(0, 2), (0, 2), (2, 4), (2, 4)]
LENGTHS = [20, 1, 1, 1, 1, 1, 1]


def take_steps(
    directory: Any, wire_dtype: str, delivery: str = "chain", hop: int | None = None
) -> Tensor:
    """Return the outputs of a prompt and some tokens; lose a hop on the way if one is named."""
    generator = torch.Generator().manual_seed(SEED)
    steps = [torch.randn(1, num_tokens, 64, generator=generator) for num_tokens in LENGTHS]
    # Peers with int8 weights replay to the bit.
    swarm = LoopbackSwarm(directory, spans=SPANS, weights="int8", seed=SEED)
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            directory, connect=swarm.connect, seed=SEED, wire_dtype=wire_dtype, delivery=delivery
        ) as model,
        model.inference_session(max_length=sum(LENGTHS)) as session,
    ):
        outputs = [session.step(hidden_BTH) for hidden_BTH in steps[:4]]
        if hop is not None:
            swarm.network.kill(swarm.find(session.hops[hop].peer.peer_id).host)
        outputs += [session.step(hidden_BTH) for hidden_BTH in steps[4:]]
        assert len(session.failovers) == (hop is not None)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("hop", [0, 1])
def test_killed_peer_changes_nothing(tiny_models: Any, delivery: str, hop: int) -> None:
    directory = tiny_models.get().directory

    undisturbed = take_steps(directory, "int8", delivery)

    assert torch.equal(take_steps(directory, "int8", delivery, hop), undisturbed)


def test_star_and_chain_round_the_same(tiny_models: Any) -> None:
    directory = tiny_models.get().directory

    assert torch.equal(*(take_steps(directory, "int8", name) for name in ("star", "chain")))


def test_outputs_are_about_those_of_an_exact_wire(tiny_models: Any) -> None:
    directory = tiny_models.get().directory

    exact, rounded = (take_steps(directory, name) for name in ("fp32", "int8"))

    # Each hop gets its input off by up to half a step, a 254th of the largest in a group.
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("delivery", ["chain"])
def test_peer_of_an_older_version_replaces_nobody_and_is_not_to_blame(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take_all(session, turns[:2])
        lost = world.hosts_of(session)[1]
        (older,) = {"peer2", "peer3"} - {lost}
        opened: list[str] = []
        when_it_opens_a_session(world.peer_on(older), lambda: opened.append(older))
        view = world.swarm.book.view
        peers = [replace(peer, max_version=INT8_VERSION - 1) for peer in view.peers]
        world.swarm.book.view = SwarmView.from_announcements(view.model_id, peers, view.taken_at, 4)

        # Either would say what the peer really speaks.
        world.loopback._store.is_reachable = False
        world.swarm.book.take_view = lambda: None
        world.network.kill(lost)
        with pytest.raises(RouteError, match="too old for hidden states in int8"):
            await world.take(session, turns[2])

        assert opened == []
        assert world.quarantined_hosts == {lost}

    run_story(story, wire_dtype="int8", failover_timeout_seconds=0.3)


def when_it_opens_a_session(peer: Any, act: Callable[[], object]) -> None:
    """Do something when a peer is about to open a session."""
    admission: Any = look_into(peer).admission
    open_session = admission.open

    async def open_it(*arguments: Any) -> Any:
        act()
        return await open_session(*arguments)

    admission.open = open_it
