"""How fast a peer says that one session decodes under its present load."""

from __future__ import annotations

import asyncio

import pytest
from service_scene import Peer, draw_hidden, expect_output, make_step, with_peer
from virtual_time import VirtualClock, run_virtual

from shoal.peer.engine.engine import Engine
from shoal.peer.sessions.sessions import LoadedSpeed
from shoal.protocol.records.announcements import Announcement


def test_speed_is_that_of_recent_steps() -> None:
    async def main() -> None:
        speed = LoadedSpeed(VirtualClock().now)
        assert speed.steps_per_second is None

        speed.note(0.1, 1.0)
        assert speed.steps_per_second == pytest.approx(10.0)
        for _ in range(200):
            speed.note(0.5, 1.0)
        assert speed.steps_per_second == pytest.approx(2.0, rel=0.01)

        await asyncio.sleep(31.0)
        assert speed.steps_per_second is None, "nobody decodes any more"
        speed.note(0.1, 1.0)
        assert speed.steps_per_second == pytest.approx(10.0), "what was is forgotten"

    run_virtual(main())


def test_step_through_a_part_of_the_span_counts_as_one_through_all_of_it() -> None:
    async def main() -> None:
        speed = LoadedSpeed(VirtualClock().now)

        speed.note(0.1, 0.25)

        assert speed.steps_per_second == pytest.approx(2.5)

    run_virtual(main())


async def announce(peer: Peer) -> Announcement:
    """Return what the peer says now."""
    announcer = peer.service.peer.announcer
    await announcer.announce(announcer.state)
    (told,) = await peer.read_directory()
    return told


@with_peer()
async def test_peer_announces_how_fast_sessions_decode_while_they_do(
    peer: Peer, engine: Engine
) -> None:
    talk = await peer.open()
    expect_output(await talk.ask(make_step(1, 0, draw_hidden(1, num_tokens=5))))
    assert (await announce(peer)).loaded_decode_steps_per_second is None, "no token was decoded"

    expect_output(await talk.ask(make_step(2, 5, draw_hidden(2))))
    told = await announce(peer)
    assert told.loaded_decode_steps_per_second
    # That of the peer alone is what a test says of this engine.
    assert told.decode_steps_per_second == 100.0

    await asyncio.sleep(60.0)
    assert (await announce(peer)).loaded_decode_steps_per_second is None
