"""With int8 weights a rebuilt cache is the lost one bit by bit, whatever led to it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

SEED = 7

# (position to go back to or None, tokens of the step). Up to eight tokens at once take the path
# of few rows, more that of many; a rollback cuts a prompt of the one to the length of the other.
HISTORIES = {
    "prompt-and-tokens": [(None, 20), *[(None, 1)] * 8],
    "short-then-long-prompt": [(None, 5), (None, 20)],
    "long-prompt-cut-short": [(None, 20), (6, 1), (None, 1)],
    "tokens-rolled-back": [(None, 12), *[(None, 1)] * 6, (15, 1), (None, 9)],
}


def run(model_directory: Any, history: list[tuple[int | None, int]], is_killed: bool) -> Tensor:
    """Go through a history, lose the peer or not, and return what the next token leads to."""
    swarm = LoopbackSwarm(model_directory, spans=[(0, 4), (0, 4)], weights="int8", seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    connect = AutoDistributedModelForCausalLM.from_pretrained
    with (
        connect(model_directory, connect=swarm.connect, seed=SEED) as model,
        model.inference_session(max_length=64) as session,
    ):
        output_BTH = torch.empty(0)
        for position, num_tokens in [*history, (None, 1)]:
            if position is not None:
                session.position = position
            if is_killed and num_tokens == 1 and session.position == end(history):
                swarm.network.kill(swarm.find(session.hops[0].peer.peer_id).host)
            hidden_BTH = torch.randn(1, num_tokens, 64, generator=generator)
            output_BTH = session.step(hidden_BTH)
        assert len(session.failovers) == is_killed
    return output_BTH


def end(history: list[tuple[int | None, int]]) -> int:
    """Return the position behind a history."""
    position = 0
    for back_to, num_tokens in history:
        position = (position if back_to is None else back_to) + num_tokens
    return position


@pytest.mark.parametrize("name", list(HISTORIES))
def test_int8_replay_equals_what_was_lost(tiny_models: Any, name: str) -> None:
    directory = tiny_models.get().directory

    undisturbed = run(directory, HISTORIES[name], is_killed=False)

    assert torch.equal(run(directory, HISTORIES[name], is_killed=True), undisturbed)


@pytest.mark.parametrize(("wire_dtype", "is_same"), [("fp32", True), ("bf16", False)])
def test_peers_with_other_borders_compute_the_same_if_nothing_is_rounded_there(
    tiny_models: Any, wire_dtype: str, is_same: bool
) -> None:
    directory = tiny_models.get().directory

    def take(spans: list[tuple[int, int]], is_killed: bool) -> Tensor:
        swarm = LoopbackSwarm(directory, spans=spans, weights="int8", seed=SEED)
        generator = torch.Generator().manual_seed(SEED)
        connect = AutoDistributedModelForCausalLM.from_pretrained
        with (
            connect(directory, connect=swarm.connect, seed=SEED, wire_dtype=wire_dtype) as model,
            model.inference_session(max_length=64) as session,
        ):
            session.step(torch.randn(1, 20, 64, generator=generator))
            assert [(hop.span.start, hop.span.stop) for hop in session.hops] == [(0, 4)]
            if is_killed:
                swarm.network.kill(swarm.find(session.hops[0].peer.peer_id).host)
            steps = [torch.randn(1, 1, 64, generator=generator) for _ in range(3)]
            outputs = [session.step(hidden_BTH) for hidden_BTH in steps]
            assert len(session.hops) == 1 + is_killed
        return torch.cat(outputs, dim=1)

    undisturbed = take([(0, 4)], is_killed=False)
    cut_in_two = take([(0, 4), (0, 2), (2, 4)], is_killed=True)

    assert torch.equal(cut_in_two, undisturbed) is is_same
    assert (cut_in_two - undisturbed).norm() < 0.03 * undisturbed.norm()
