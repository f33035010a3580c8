"""Strangers say more than a peer has time for, and others have their turn in between."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from service_scene import HELLO, NOBODYS_NUMBER, Peer, Talk, make_open, make_session, with_peer

from shoal.protocol.ids import ClientToken
from shoal.protocol.messages.session import Close, Opened, Probe, Status, Welcome

NUM_FRAMES = 8000
NUM_STREAMS = 8
MOST_PER_SECOND = 2500
"""Useless frames of one client, if taking them took no time at all."""


async def flood(talk: Talk) -> None:
    """Say again and again what changes nothing."""
    useless = [Close(make_session(NOBODYS_NUMBER), 1)] * 100
    for _ in range(NUM_FRAMES // NUM_STREAMS // 100):
        await talk.say(*useless)
    await talk.wait_until_read()


@pytest.mark.parametrize("host", ["elsewhere", "client"])
@with_peer()
async def test_flood_of_useless_frames_has_its_turns_and_others_wait_for_none(
    peer: Peer, host: str
) -> None:
    """Also another client of the same address, which has its own part of the time."""
    loop = asyncio.get_running_loop()
    honest = await peer.at_host(host).dial()
    hello = replace(HELLO, client=ClientToken(b"an honest client"))
    assert isinstance(await honest.ask(hello), Welcome)
    assert isinstance(await honest.ask(make_open()), Opened)
    began_at, seconds = loop.time(), list[float]()
    async with asyncio.TaskGroup() as tasks:
        floods = [tasks.create_task(flood(await peer.greet())) for _ in range(NUM_STREAMS)]
        while not all(done.done() for done in floods):
            asked_at = loop.time()
            assert isinstance(await honest.ask(Probe(make_session(1), 1)), Status)
            seconds.append(loop.time() - asked_at)
            await asyncio.sleep(0.01)

    assert loop.time() - began_at > NUM_FRAMES / MOST_PER_SECOND
    assert len(seconds) > 100
    assert max(seconds) < 0.001
