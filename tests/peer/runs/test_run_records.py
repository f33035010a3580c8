"""Records of runs in a swarm: newcomers find them, and members let in whom the owner admits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from run_swarm import OWNER, RunSwarm, make_identity, run_in_swarm
from virtual_time import VirtualClock

from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.net.run_search import find_run, search_runs
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.runs.run_record import RunRecord, make_run_id, sign_run
from shoal.protocol.runs.training_run import TrainingRun
from shoal.protocol.spans import Span

STRANGER = Identity(bytes(32))


async def find(swarm: RunSwarm, wanted: str, host: str = "newcomer") -> RunRecord | None:
    """Find a run as the peer of a host that knows its name or id only."""
    return await find_run(wanted, make_identity(host).peer_id, partial(search, swarm))


async def search(swarm: RunSwarm, wanted: str) -> list[RunRecord]:
    return await search_runs(wanted, swarm.make_network("newcomer"), VirtualClock())


def test_newcomer_joins_a_run_by_its_name_or_id(run: TrainingRun, folder: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        assert await find(swarm, "test") is None
        await swarm.start("peer0", 0, founds_run=True)
        record = await find(swarm, "test")
        assert record is not None
        assert (record, record.owner, record.run) == (swarm.record, OWNER.peer_id, run)
        assert await find(swarm, record.run_id) == record
        assert await search(swarm, "another") == []
        await swarm.start("newcomer", 1, record=record)
        await swarm.finish()
        announced = await swarm.list_announcements()
        assert {one.span: one.state for one in announced} == {
            Span(0, 2): PeerState.ONLINE,
            Span(2, 4): PeerState.ONLINE,
        }
        for peer in swarm.peers.values():
            await peer.announcer.announce(PeerState.ONLINE)
        for one in await swarm.list_announcements():
            assert one.training is not None
            assert (one.training.update, one.training.num_updates) == (run.num_updates,) * 2
            assert one.training.loss > 0

    run_in_swarm(run, folder, scene, num_peers=0)


def test_peer_that_is_not_admitted_neither_joins_nor_takes_others_in(
    run: TrainingRun, folder: Path
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        lax = replace(swarm.record, admitted=())  # for one that does not care what its id means
        await swarm.start("stranger", 0, founds_run=True, record=lax)
        with pytest.raises(UsageError, match="does not admit this peer"):
            await find(swarm, "test", "stranger")
        await swarm.start("peer1", 1)
        await asyncio.sleep(10.0)
        assert swarm.peers["peer1"].loop.decisions is None
        await swarm.kill("stranger")
        await swarm.start("peer0", 0, founds_run=True)
        await swarm.start("stranger", 1, record=lax)
        await asyncio.sleep(10.0)
        assert swarm.peers["stranger"].loop.decisions is None
        await swarm.kill("stranger")
        await swarm.finish()

    run_in_swarm(run, folder, scene, num_peers=0, admitted=("peer0", "peer1"))


def test_runs_of_one_name_are_told_apart_by_their_ids(run: TrainingRun, folder: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        records = swarm.record, sign_run(STRANGER, run)
        for number, record in enumerate(records):
            await swarm.start(f"peer{number}", 0, founds_run=True, record=record)
        with pytest.raises(UsageError, match="this swarm has 2 runs called test: ") as complaint:
            await find(swarm, "test")
        for record in records:
            assert f"{record.run_id} of {record.owner}" in str(complaint.value)
            assert await find(swarm, record.run_id) == record

    run_in_swarm(run, folder, scene, num_peers=0)


@pytest.mark.parametrize(
    "forge",
    [
        lambda record: record.document.replace(b'"seed":7', b'"seed":8'),
        lambda record: sign_run(STRANGER, record.run).document,
        lambda record: record.document[:64],
    ],
    ids=["changed", "of another run", "cut short"],
)
def test_forged_record_is_passed_over(
    run: TrainingRun, folder: Path, forge: Callable[[RunRecord], bytes]
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        forged = replace(swarm.record, document=forge(swarm.record))
        await swarm.start("liar", 0, record=forged)
        assert await search(swarm, "test") == []
        await swarm.start("peer0", 0, founds_run=True)
        assert await search(swarm, "test") == [swarm.record]

    run_in_swarm(run, folder, scene, num_peers=0)


def test_run_of_a_newer_version_is_told_to_those_who_look_for_it(
    run: TrainingRun, folder: Path
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        newer = sign_newer_run(swarm.record)
        await swarm.start("newer", 0, founds_run=True, record=newer)
        for wanted in ("test", newer.run_id):
            with pytest.raises(UsageError, match=f"run {wanted}: .* 'run.loss_scale'.* newer"):
                await search(swarm, wanted)
        assert await search(swarm, "another") == []
        await swarm.start("peer0", 0, founds_run=True)
        assert await search(swarm, "test") == [swarm.record]

    run_in_swarm(run, folder, scene, num_peers=0)


def sign_newer_run(record: RunRecord) -> RunRecord:
    """Return the record of a run with a setting that this version does not know."""
    content = json.loads(record.document[65:])
    content["run"]["loss_scale"] = 2
    body = json.dumps(content).encode()
    body += b" " * (-(65 + len(body)) % 4)
    document = b"\x01" + OWNER.sign(b"shoal run record 1\0" + body) + body
    return replace(record, document=document, run_id=make_run_id(document))
