"""Deep prompts of a session come to every peer that computes their positions, once each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chosen_cases import choose_cases
from memory_swarm import look_into
from torch import Tensor
from tuning_scene import REPLICAS, assert_close, open_model

from shoal.protocol.errors import UsageError

HIDDEN = 64


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TEXT = draw(2, 9, HIDDEN)
PROMPTS = 0.3 * draw(4, 1, 3, HIDDEN, seed=2)
OWN_PROMPTS = 0.3 * draw(4, 2, 3, HIDDEN, seed=3)


by_rows = pytest.mark.parametrize("prompts", [PROMPTS, OWN_PROMPTS], ids=["one", "each its own"])


@pytest.fixture(params=["star", "chain"])
def delivery(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(tiny_models: Any, delivery: str) -> Iterator[Any]:
    with open_model(tiny_models.get(), REPLICAS, delivery=delivery) as model:
        yield model


@by_rows
@pytest.mark.parametrize("num_first", [9, 6, 3])
def test_steps_are_those_of_a_pass(model: Any, num_first: int, prompts: Tensor) -> None:
    blocks = model.transformer.h
    expected = blocks(TEXT, prompts)

    with blocks.inference_session(max_length=12) as session:
        parts = [session.step(TEXT[:, :num_first], prompts.expand(-1, 2, -1, -1))]
        parts += [session.step(TEXT[:, n : n + 1]) for n in range(num_first, 9)]

    assert_close(torch.cat(parts, dim=1), expected)


@by_rows
def test_positions_computed_again_have_their_prompts_again(model: Any, prompts: Tensor) -> None:
    blocks = model.transformer.h
    expected = blocks(TEXT, prompts)

    with blocks.inference_session(max_length=12) as session:
        session.step(TEXT, prompts)
        session.position = 1
        assert_close(session.step(TEXT[:, 1:]), expected[:, 1:])
        session.position = 2
        assert_close(session.step(TEXT[:, 2:3]), expected[:, 2:3])
        with session.fork() as fork:
            fork.position = 1
            assert_close(fork.step(TEXT[:, 1:]), expected[:, 1:])


def test_text_that_begins_anew_has_the_prompts_of_its_first_step(model: Any) -> None:
    blocks = model.transformer.h

    with blocks.open_session(12) as session:
        for prompts in (PROMPTS, PROMPTS, 2 * PROMPTS, OWN_PROMPTS, None, OWN_PROMPTS):
            session.position = 0
            found = session.step(TEXT, prompts)
            expected = blocks(TEXT) if prompts is None else blocks(TEXT, prompts)
            assert_close(found, expected)
        session.position = 0
        assert_close(session.step(TEXT[:1], PROMPTS), blocks(TEXT[:1], PROMPTS))


@pytest.mark.parametrize(
    ("delivery", "standby"),
    choose_cases([("chain", True), ("star", False)], ["chain", "star"], [False, True]),
)
def test_peer_that_takes_over_gets_the_prompts(
    tiny_models: Any, delivery: str, standby: bool
) -> None:
    tiny = tiny_models.get()
    with open_model(tiny, REPLICAS, delivery=delivery, standby=standby) as model:
        blocks, swarm = model.transformer.h, model.swarm
        for lost, prompts in enumerate((PROMPTS, OWN_PROMPTS)):
            expected = blocks(TEXT, prompts)
            with blocks.inference_session(max_length=12) as session:
                parts = [session.step(TEXT[:, :5], prompts), session.step(TEXT[:, 5:6])]
                host = swarm.find(session.hops[lost].peer.peer_id).host
                swarm.network.pause(host)
                parts += [session.step(TEXT[:, n : n + 1]) for n in range(6, 9)]
                assert len(session.failovers) == 1
            swarm.network.resume(host)
            assert_close(torch.cat(parts, dim=1), expected)


def test_peers_keep_nothing_of_prompts(model: Any) -> None:
    blocks, services = model.transformer.h, [look_into(peer) for peer in model.swarm.peers]

    with blocks.inference_session(max_length=12) as session:
        session.step(TEXT, PROMPTS)
        assert sum(service.prompts.used_bytes for service in services) == PROMPTS.numel() * 4
    model.close()

    assert sum(service.prompts.used_bytes for service in services) == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (draw(3, 1, 3, HIDDEN), "deep prompts must be"),
        (torch.full((4, 1, 3, HIDDEN), float("nan")), "NaN"),
        (draw(4, 1, 10, HIDDEN), "deep prompts must be"),
    ],
    ids=["blocks", "not a number", "too long"],
)
def test_prompts_that_cannot_be_are_refused(model: Any, prompts: Tensor, message: str) -> None:
    with model.transformer.h.inference_session(max_length=12) as session:
        with pytest.raises(UsageError, match=message):
            session.step(TEXT, prompts)
        session.step(TEXT)
        with pytest.raises(UsageError, match="the beginning of a text"):
            session.step(TEXT[:, :3], PROMPTS)


def test_rows_with_prompts_of_their_own_stay_where_they_are(model: Any) -> None:
    blocks, swap = model.transformer.h, torch.tensor([1, 0])
    expected = blocks(TEXT, OWN_PROMPTS)

    with blocks.inference_session(max_length=12) as session:
        session.step(TEXT[:, :5], OWN_PROMPTS)
        for wrong in (TEXT[:, 5:6], TEXT[:, :0]):
            with pytest.raises(UsageError, match="cannot be reordered"):
                session.step(wrong, hypo_ids=swap)
        assert_close(session.step(TEXT[:, 5:], hypo_ids=torch.tensor([0, 1])), expected[:, 5:])

        session.position = 0
        session.step(TEXT[:, :5], PROMPTS)
        moved = session.step(TEXT[:, 5:], hypo_ids=swap)
    swapped = torch.cat([TEXT[[1, 0], :5], TEXT[:, 5:]], dim=1)
    assert_close(moved, blocks(swapped, PROMPTS)[:, 5:])
