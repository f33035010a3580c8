"""Members and strangers that download the state of a stage for longer than an update takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from run_swarm import RunSwarm, change_manifest, make_identity, run_in_swarm, train_in_swarm
from virtual_time import VirtualClock

from shoal.peer.process.config import PeerEvent
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import (
    StateFollows,
)
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.runs.training_run import TrainingRun

NUM_UPDATES = 6


def train(run: TrainingRun, folder: Path, scene: Callable[[RunSwarm], Awaitable[object]]) -> str:
    """Train with three peers, of which one holds stage 1; return the digest at the end."""
    return train_in_swarm(run, folder, scene, num_peers=3)


def slow_down(swarm: RunSwarm, host: str, seconds: float, holder: str = "peer1") -> None:
    """Let the state of stage 1 take so long to a host."""
    stage = swarm.peers[holder].loop.stage
    assert stage is not None
    num_bytes = sum(tensor.nbytes for tensor in stage.span.read_state().values())
    swarm.network.set_link(holder, host, Link(0.002, num_bytes / seconds))


def test_newcomer_whose_download_outlasts_updates_takes_part_soon(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        slow_down(swarm, "slow", 3.0)
        await swarm.start("slow", 1)
        await swarm.finish()
        assert list_waits(swarm, "slow") == ["the state of stage 1 from another peer, 0 % are here"]
        num_passed = [swarm.num_passed["slow", update] for update in range(NUM_UPDATES)]
        assert all(num_passed[-3:]), num_passed

    assert train(run, folder, scene) == quiet_digest


def test_newcomer_that_never_has_its_state_is_left_out_and_told_why(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    def falsify(message: Message) -> Message:
        changes = {"fetched_bytes": 2 * 10**8, "state_bytes": 3 * 10**8}
        return change_manifest(message, is_ready=False, **changes)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        swarm.falsify["slow"] = falsify
        begun_at = VirtualClock().now()
        await swarm.start("slow", 1)
        what = "a peer of stage 1 to get its state: it has 180 of 300 MB"
        await swarm.wait_until(lambda: what in list_waits(swarm, "peer0"))
        await swarm.wait_for_update(NUM_UPDATES)
        assert 100.0 < VirtualClock().now() - begun_at < 120.0
        await swarm.wait_until(lambda: len(list_waits(swarm, "slow")) > 0)
        why = (
            "it had 180 of 300 MB of stage 1's state after the run had waited 100 s for it; it may "
            "join again in "
        )
        assert why in list_waits(swarm, "slow")[-1]
        (event,) = list_slow(swarm)
        assert event.facts["peer"] == make_identity("slow").peer_id
        await swarm.kill("slow")

    assert train(run, folder, scene) == quiet_digest


def list_waits(swarm: RunSwarm, host: str) -> list[str]:
    events = [event for name, event in swarm.events if name == host]
    return [str(event.facts["what"]) for event in events if event.name == "waiting_for"]


def list_slow(swarm: RunSwarm) -> list[PeerEvent]:
    return [event for _, event in swarm.events if event.name == "too_slow"]


def waits_for_download(swarm: RunSwarm) -> bool:
    waits = list_waits(swarm, "peer0")
    return any("a peer of stage 1 to get its state" in what for what in waits)


def test_kill_of_another_peer_does_not_end_the_wait_for_a_download(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        slow_down(swarm, "slow", 8.0)
        await swarm.start("slow", 1)
        await swarm.wait_until(lambda: waits_for_download(swarm))
        await asyncio.sleep(2.0)
        await swarm.kill("peer2")
        await swarm.finish()
        assert not list_slow(swarm)

    assert train(run, folder, scene) == quiet_digest


@pytest.mark.parametrize("is_applying", [False, True])
def test_member_that_answers_and_never_becomes_ready_is_left_out(
    run: TrainingRun, folder: Path, quiet_digest: str, is_applying: bool
) -> None:
    def falsify(message: Message) -> Message:
        told = {"is_ready": False, "is_applying": is_applying}
        return change_manifest(message, **told, state=bytes(32), fetched_bytes=0, state_bytes=0)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(2)  # how long members apply the first one is known then
        swarm.falsify["peer2"] = falsify
        await swarm.wait_until(lambda: len(list_slow(swarm)) > 0)
        assert max(swarm.list_updates()) < NUM_UPDATES
        await swarm.kill("peer2")
        (event,) = list_slow(swarm)
        assert "it had nothing of stage 0's state after" in str(event.facts["why"])
        assert "waited 30 s for it" in str(event.facts["why"])

    assert train(run, folder, scene) == quiet_digest


def test_newcomer_that_is_gone_when_the_wait_for_a_download_ends_is_not_let_in(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_until(lambda: len(swarm.peers) == 4 and min(swarm.list_updates()) >= 1)
        for holder in ("peer1", "peer3"):
            slow_down(swarm, "slow", 8.0, holder)
        await swarm.start("slow", 1)
        await swarm.wait_until(lambda: waits_for_download(swarm))
        await swarm.start("gone", 0)
        await asyncio.sleep(2.0)
        await swarm.kill("gone")
        await swarm.kill("peer2")  # its parts are computed again, so that no commit waits then
        await swarm.finish()
        gone = make_identity("gone").peer_id
        assert not any(event.facts.get("peer") == gone for _, event in swarm.events)

    assert train_in_swarm(run, folder, scene, num_peers=4) == quiet_digest


def test_peer_leaves_when_a_slow_newcomer_has_its_state(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        slow_down(swarm, "slow", 3.0)
        leaving = asyncio.create_task(swarm.leave("peer1"))
        await swarm.start("slow", 1)
        await leaving
        assert max(swarm.list_updates()) < NUM_UPDATES

    assert train(run, folder, scene) == quiet_digest


def test_run_says_that_a_refused_part_waits_for_a_download(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    def refuse(message: Message) -> Message:
        refused = frozenset(range(run.parts_per_update))
        return change_manifest(message, counted={}, audited={}, refused=refused)

    async def scene(swarm: RunSwarm) -> None:
        def has_come() -> bool:
            slow = make_identity("slow").peer_id
            return any(event.facts.get("peer") == slow for _, event in swarm.events)

        await swarm.wait_for_update(1)
        slow_down(swarm, "slow", 3.0)
        await swarm.start("slow", 1)
        await swarm.wait_until(has_come)
        assert not waits_for_download(swarm)
        swarm.falsify["peer1"] = refuse
        await swarm.wait_until(lambda: waits_for_download(swarm))
        del swarm.falsify["peer1"]

    assert train(run, folder, scene) == quiet_digest


def sends_state(message: Message) -> bool:
    return isinstance(message, StateFollows) and message.num_bytes > 0


def test_run_waits_until_a_state_is_loaded_and_not_only_downloaded(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        swarm.do_at(sends_state, lambda host: swarm.slow.update(slow=100.0), is_sent=True)
        await swarm.start("slow", 1)
        await swarm.wait_until(lambda: swarm.peers["slow"].loop.is_ready)
        swarm.slow["slow"] = 1.0
        assert max(swarm.list_updates()) < NUM_UPDATES
        assert not list_slow(swarm)

    assert train(run, folder, scene) == quiet_digest


def test_run_ends_for_a_refused_part_though_a_newcomer_never_has_its_state(
    run: TrainingRun, folder: Path
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        slow_down(swarm, "slow", 3.0)
        await swarm.start("slow", 1)
        await swarm.wait_until(lambda: bool(list_waits(swarm, "slow")))
        stage = swarm.peers["peer1"].loop.stage
        assert stage is not None
        for weight in stage.span.read_weights().values():
            weight.fill_(float("nan"))  # nor is it what its digest tells
        await swarm.peers["peer0"].loop.is_over.wait()
        assert "are not finite at stage 1" in str(swarm.peers["peer0"].loop.failure)

    run_in_swarm(run, folder, scene, num_peers=3)
