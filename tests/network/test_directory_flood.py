"""Valid records of strangers must not keep a node of the DHT from answering. Starts real p2pds."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import pytest
from announcements import MODEL
from directory_processes import CLOCK, Directories, announce_now, look_up, sign_now
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from swarm_values import number_identity

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import UnavailableError
from shoal.protocol.ids import PeerId
from shoal.protocol.membership.membership import GREETING_NONCE_BYTES
from shoal.protocol.messages.codec import encode_frame
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.libp2p.swarm_question import make_ask
from shoal.protocol.records.announcements import sign_announcement
from shoal.protocol.records.swarm_records import SwarmRecords

pytestmark = pytest.mark.network


def make_large_value(directory: HivemindDirectory, number: int) -> bytes:
    """Return what a peer may announce, nearly as large as it may be."""
    identity = number_identity(number)
    announcement = announce_now(
        1,
        peer_id=identity.peer_id,
        endpoints=(Endpoint("h" * 250, 65535, "c" * 64),) * 8,
        expires_at=CLOCK.wall() + 250,
        software="s" * 64,
    )
    record = sign_announcement(identity, announcement)
    return SwarmRecords(directory.membership).add_own(record, CLOCK.wall()).value


async def test_flooded_node_still_answers(dht: Directories) -> None:
    """As if the records of 2,000 strangers had come one by one for long."""
    flooded = await dht.join()
    reader = await dht.read(flooded.addresses)
    values = [make_large_value(flooded, number) for number in range(2000)]
    assert flooded.records.take_all(MODEL, values, CLOCK.wall()) == 2000

    theirs = await flooded.lookup(MODEL)
    found = await reader.lookup(MODEL)
    while 0 < len(found) < len(theirs):  # each lookup brings more of them
        num_before = len(found)
        found = await reader.lookup(MODEL)
        assert len(found) > num_before

    assert sorted(found, key=str) == sorted(theirs, key=str)


async def test_node_that_is_asked_too_much_refuses_and_answers_others(dht: Directories) -> None:
    """A stranger gets three quarters of what a node answers in ten seconds at once: 150 of the
    longest answers.
    """
    node = await dht.join([], 1)
    await node.announce(sign_now(1))
    greedy = await dht.read(node.addresses)
    other = await dht.read(node.addresses)
    client: Any = greedy._access.p2p._client  # type: ignore[union-attr]
    num_answers, refusal = 0, ""

    while not refusal and num_answers < 2000:
        fetch = greedy.records.make_fetch(MODEL, CLOCK.wall(), greedy._rng)
        question = greedy.records.seal(MODEL.encode() + encode_frame(fetch))
        try:
            await client.call_unary_handler(node._access.p2p.peer_id, "shoal.records.2", question)
        except P2PHandlerError as error:
            refusal = str(error)
        num_answers += not refusal

    assert "too many announcements" in refusal
    assert 150 <= num_answers < 400
    assert await look_up(other) == {node._access.p2p.peer_id.to_base58()}  # type: ignore[union-attr]


async def test_node_that_is_asked_for_its_swarm_too_much_refuses(dht: Directories) -> None:
    node = await dht.join([], 1)
    greedy = await dht.read(node.addresses)
    ask = make_ask(greedy._access.p2p)
    peer_id = PeerId(node._access.p2p.peer_id.to_base58())  # type: ignore[union-attr]

    async def ask_much() -> None:
        for _ in range(4000):
            await ask(peer_id, bytes(GREETING_NONCE_BYTES))

    with pytest.raises(UnavailableError, match="you ask too often"):
        await ask_much()
    assert (await dht.read(node.addresses)).membership == node.membership
