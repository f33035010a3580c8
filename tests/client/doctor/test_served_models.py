"""The models of a swarm, as `shoal models` finds them, over a network in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from diagnosis_scene import Swarm
from virtual_time import run_virtual

from shoal.client.doctor.peer_check import MAX_PEERS_ASKED
from shoal.client.doctor.served_models import ServedModel
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.session import Welcome
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

OTHER_MODEL = ModelId("b" * 32)


def welcome_to(model_id: ModelId) -> Callable[[Welcome], Welcome]:
    return lambda welcome: replace(welcome, model_id=model_id)


def list_models(build: Callable[[Swarm], Any]) -> list[ServedModel]:
    """Build a swarm and return the models that it serves."""

    async def run() -> list[ServedModel]:
        swarm = Swarm()
        await build(swarm)
        return await swarm.find_served_models()

    return run_virtual(run())


def test_swarm_of_two_models_lists_both_and_what_is_missing() -> None:
    async def build(swarm: Swarm) -> None:
        for span, speed in ((Span(0, 4), 100.0), (Span(4, 8), 50.0), (Span(0, 8), 1.0)):
            await swarm.add(span, model_name="stories", decode_steps_per_second=speed)
        other = {"model_id": OTHER_MODEL, "num_blocks": 6, "model_name": "org/other"}
        await swarm.add(Span(1, 4), answer=welcome_to(OTHER_MODEL), **other)
        await swarm.add(Span(4, 6), answer=welcome_to(OTHER_MODEL), **other)

    stories, other = list_models(build)

    assert (stories.name, stories.is_complete, stories.num_replicas) == ("stories", True, 2)
    assert len(stories.view.online) == 3
    # Both halves, half a round trip of 0.1 s before and behind them, and between them a whole one:
    # nothing says that they are nearer to each other.
    assert stories.tokens_per_second == pytest.approx(1 / (0.01 + 0.02 + 0.2), rel=0.01)
    assert (other.name, other.is_complete, other.num_replicas) == ("org/other", False, 0)
    assert other.view.gaps == (Span(0, 1),)
    assert other.tokens_per_second is None


def test_peers_that_do_not_answer_as_announced_do_not_count() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        await swarm.add(Span(0, 8), answer=welcome_to(OTHER_MODEL))
        await swarm.add(Span(4, 8), endpoints=(Endpoint("gone", 1, ""),))
        await swarm.add(Span(0, 8), state=PeerState.DRAINING)

    (model,) = list_models(build)

    assert (model.num_replicas, model.num_silent) == (1, 2)
    assert model.name == ""
    assert model.tokens_per_second is None  # nobody says


@pytest.mark.parametrize("is_answered", [True, False])
def test_peers_that_are_not_asked_do_not_count(is_answered: bool) -> None:
    async def build(swarm: Swarm) -> None:
        elsewhere: dict[str, Any] = {} if is_answered else {"endpoints": (Endpoint("gone", 1, ""),)}
        for _ in range(MAX_PEERS_ASKED + 6):
            await swarm.add(Span(0, 8), model_name="stories", **elsewhere)

    (model,) = list_models(build)

    num_answers = MAX_PEERS_ASKED if is_answered else 0
    assert model.num_unasked == 6
    assert model.num_silent == MAX_PEERS_ASKED - num_answers
    assert (model.num_replicas, model.is_complete) == (num_answers, is_answered)
    assert model.name == ("stories" if is_answered else "")


def test_model_whose_peers_have_all_gone_is_not_listed() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), state=PeerState.OFFLINE)
        await swarm.add(Span(0, 8), state=PeerState.JOINING, model_id=OTHER_MODEL)

    assert list_models(build) == []


def test_name_is_what_most_peers_say() -> None:
    async def build(swarm: Swarm) -> None:
        for name in ("stories", "org/stories", "stories", ""):
            await swarm.add(Span(0, 8), model_name=name)

    (model,) = list_models(build)

    assert model.name == "stories"
