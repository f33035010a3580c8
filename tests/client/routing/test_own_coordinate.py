"""A client that finds out where it stands before its first route."""

from __future__ import annotations

import random
from typing import Any

import pytest
from session_scene import SessionScene, draw, in_scene, now

from shoal.client.routing.own_coordinate import LEAST_LANDMARKS, choose_landmarks
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.records.coordinates import Coordinate

NUM_LANDMARKS = 6


async def add_peer(scene: SessionScene, name: str, place: float, **facts: Any) -> None:
    """Add a peer so many seconds away from the client, in a direction of its own by its sign."""
    coordinate = Coordinate(place, 0.0, 0.0, 0.0, 0.1)
    await scene.add(name, 0, 6, **({"coordinate": coordinate} | facts))
    for source, target in (("client", name), (name, "client")):
        scene.network.set_link(source, target, Link(delay_seconds=abs(place) / 2))


async def add_landmarks(scene: SessionScene, **facts: Any) -> None:
    """Add peers that know where they stand, all of them full."""
    for number in range(NUM_LANDMARKS):
        place = (0.1 + 0.01 * number) * (-1) ** number
        await add_peer(scene, f"landmark{number}", place, queue_seconds=5.0, **facts)
    await scene.swarm.book.refresh()


@in_scene()
async def test_client_knows_who_is_near_although_it_has_met_nobody(scene: SessionScene) -> None:
    await add_landmarks(scene)
    await scene.swarm.survey()
    for number, place in enumerate((0.15, 0.01, -0.12, -0.18)):
        await add_peer(scene, f"peer{number}", place)
    await scene.swarm.book.refresh()
    session = scene.open_session()

    await session.step(draw(1))

    assert scene.names_of(session) == ["peer1"]


@in_scene()
async def test_first_session_measures_and_the_next_one_knows(scene: SessionScene) -> None:
    await add_landmarks(scene)

    def count_known() -> int:
        peers = (peer.identity.peer_id for peer in scene.peers.values())
        return sum(scene.swarm.book.rtt_seconds(peer_id) is not None for peer_id in peers)

    await scene.open_session().step(draw(1))
    assert count_known() == NUM_LANDMARKS
    started_at = now()
    await scene.swarm.survey()
    assert now() == started_at


@in_scene()
async def test_landmarks_that_do_not_answer_hold_a_route_up_for_a_second(
    scene: SessionScene,
) -> None:
    await add_landmarks(scene)
    for number in range(1, NUM_LANDMARKS):
        scene.network.pause(f"landmark{number}")

    await scene.swarm.survey()

    assert now() == pytest.approx(1.0)
    assert scene.quarantined == []


@in_scene()
async def test_nobody_is_asked_where_nobody_knows_a_place(scene: SessionScene) -> None:
    await add_landmarks(scene, coordinate=Coordinate(error=0.9))

    await scene.swarm.survey()

    assert now() == 0.0
    assert choose_landmarks(scene.swarm.book.view.online, random.Random(0)) == []


@in_scene()
async def test_a_few_of_many_are_asked(scene: SessionScene) -> None:
    await add_landmarks(scene)
    peers = scene.swarm.book.view.online

    assert len(choose_landmarks(peers * 10, random.Random(0))) == 8
    assert choose_landmarks(peers[: LEAST_LANDMARKS - 1], random.Random(0)) == []
