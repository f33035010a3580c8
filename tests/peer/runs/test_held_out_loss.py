"""The held-out loss of a run over peers: that of one process, whoever computes it and dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from run_swarm import RunSwarm, nothing, run_in_swarm
from training_runs import MODEL, open_run

from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.errors import ErrorCode
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import HeldOutPass, HeldOutPassed
from shoal.protocol.messages.session import Declined
from shoal.protocol.records.announcements import TrainingProgress
from shoal.protocol.runs.training_run import TrainingRun

NUM_UPDATES = 3
Scene = Callable[[RunSwarm], Awaitable[object]]


def open_held_out(folder: Path, **changes: Any) -> TrainingRun:
    model = {**MODEL, "attention_dropout": 0.1}
    changes = {"num_updates": NUM_UPDATES, "held_out_every": 2, **changes}
    return open_run(folder, num_held_out=200, model=model, **changes)[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, float]:
    """The held-out losses of one process, by the number of updates before them."""
    run = open_held_out(folder)
    _, shards = open_run(folder, num_held_out=200)
    whole = WholeRun(run)
    measured = {
        update.number + 1: whole.measure_held_out_loss(shards) for update in whole.train(shards)
    }
    return {update: loss for update, loss in measured.items() if run.has_held_out_loss(update)}


def measure(run: TrainingRun, folder: Path, scene: Scene = nothing, num_peers: int = 4) -> RunSwarm:
    """Train until all peers that a scene leaves alive know that the run is over."""

    async def finish(swarm: RunSwarm) -> RunSwarm:
        await scene(swarm)
        for peer in list(swarm.peers.values()):
            await peer.loop.is_over.wait()
        return swarm

    return run_in_swarm(run, folder, finish, num_peers=num_peers)


def list_held_out(swarm: RunSwarm, host: str) -> dict[int, float]:
    """Return the held-out losses that a host has reported."""
    told = [event.facts for at, event in swarm.events if (at, event.name) == (host, "held_out")]
    losses = {int(str(facts["update"])): float(str(facts["loss"])) for facts in told}
    assert len(losses) == len(told)
    return losses


@pytest.mark.parametrize("num_peers", [2, 5])
def test_held_out_losses_are_those_of_one_process(
    folder: Path, alone: dict[int, float], num_peers: int
) -> None:
    swarm = measure(open_held_out(folder), folder, num_peers=num_peers)

    assert list(alone) == [2, 3]
    for number in range(num_peers):
        losses = list_held_out(swarm, f"peer{number}")
        assert losses.items() <= alone.items()
        assert losses[NUM_UPDATES] == alone[NUM_UPDATES]


def test_peers_announce_the_held_out_loss_at_the_end(folder: Path, alone: dict[int, float]) -> None:
    async def scene(swarm: RunSwarm) -> list[TrainingProgress | None]:
        for peer in list(swarm.peers.values()):
            await peer.loop.is_over.wait()
        await asyncio.sleep(1.0)  # not a whole announce period
        return [one.training for one in await swarm.list_announcements()]

    told = run_in_swarm(open_held_out(folder), folder, scene, num_peers=2)

    assert len(told) == 2
    for progress in told:
        assert progress is not None
        assert progress.update == NUM_UPDATES
        assert progress.held_out_loss == round(alone[NUM_UPDATES], 4)


def test_held_out_loss_of_int8_mode_is_measured_without_rounding(folder: Path) -> None:
    sizes = set[int]()

    def note(message: object) -> bool:
        if isinstance(message, HeldOutPass):
            sizes.add(message.num_bytes)
        return False

    async def scene(swarm: RunSwarm) -> None:
        swarm.do_at(note, lambda host: None)

    run = open_held_out(folder, mode="int8", num_updates=1)
    swarm = measure(run, folder, scene)

    _, shards = open_run(folder, num_held_out=200)
    whole = WholeRun(run)
    for _ in whole.train(shards):
        pass
    assert sizes == {0, 4 * 32 * 2 * 16}
    assert list_held_out(swarm, "peer1")[1] == pytest.approx(
        whole.measure_held_out_loss(shards), rel=0.01
    )


@pytest.mark.parametrize("host", ["peer0", "peer3"])
@pytest.mark.parametrize(("kind", "is_sent"), [(HeldOutPass, False), (HeldOutPassed, True)])
def test_peer_may_be_killed_while_the_held_out_loss_is_measured(
    folder: Path, alone: dict[int, float], host: str, kind: type, is_sent: bool
) -> None:
    killed: list[str] = []

    async def scene(swarm: RunSwarm) -> None:
        def kill(asked: str) -> None:  # peer0 leads, and asks itself without a network
            swarm.kill_soon(host)
            killed.append(host)

        def is_last(message: object) -> bool:
            is_over = max(swarm.list_updates()) == NUM_UPDATES
            return isinstance(message, kind) and is_over

        swarm.do_at(is_last, kill, is_sent=is_sent)
        await swarm.wait_until(lambda: bool(killed))

    swarm = measure(open_held_out(folder), folder, scene)

    assert killed
    survivors = {"peer0", "peer1", "peer2", "peer3"} - {host}
    assert {list_held_out(swarm, peer)[NUM_UPDATES] for peer in survivors} == {alone[NUM_UPDATES]}


def test_peer_that_is_silent_while_the_held_out_loss_is_measured_is_left_out_and_learns_it(
    folder: Path, alone: dict[int, float]
) -> None:
    paused: list[str] = []

    async def scene(swarm: RunSwarm) -> None:
        def pause(host: str) -> None:
            swarm.network.pause(host)
            paused.append(host)

        def is_last(message: object) -> bool:
            return isinstance(message, HeldOutPass) and max(swarm.list_updates()) == NUM_UPDATES

        swarm.do_at(is_last, pause)
        await swarm.wait_until(lambda: bool(paused))
        await asyncio.sleep(30.0)
        others = set(swarm.peers) - set(paused)
        assert all(list_held_out(swarm, host)[NUM_UPDATES] for host in others)
        assert NUM_UPDATES not in list_held_out(swarm, paused[0])
        swarm.network.resume(paused[0])

    swarm = measure(open_held_out(folder), folder, scene)

    assert list_held_out(swarm, paused[0])[NUM_UPDATES] == alone[NUM_UPDATES]
    waits = [str(one.facts["what"]) for _, one in swarm.events if one.name == "waiting_for"]
    assert any(what.startswith("held-out part") for what in waits), waits


def test_leader_waits_for_no_held_out_loss_that_another_leader_has_had_measured(
    folder: Path,
) -> None:
    def refuse(message: Message) -> Message:
        if not isinstance(message, HeldOutPassed):
            return message
        return Declined(message.question, 0, ErrorCode.BUSY, "no")

    def list_waits(swarm: RunSwarm) -> list[str]:
        told = [event for host, event in swarm.events if host == "peer0"]
        return [str(one.facts["what"]) for one in told if one.name == "waiting_for"]

    async def scene(swarm: RunSwarm) -> None:
        swarm.falsify = dict.fromkeys(swarm.peers, refuse)
        await swarm.wait_until(lambda: any("held-out" in what for what in list_waits(swarm)))
        decisions = swarm.peers["peer1"].loop.decisions
        assert decisions is not None
        newest, measured = decisions.newest, decisions.commit.make_measured(1.0)
        await decisions.follow(newest, newest.members, measured)
        swarm.falsify.clear()
        swarm.slow = dict.fromkeys(swarm.peers, 100.0)
        for host in ("peer1", "peer3"):
            swarm.network.pause(host)
        await swarm.wait_until(lambda: any("a majority" in what for what in list_waits(swarm)))
        num_told = len(list_waits(swarm))
        for host in ("peer1", "peer3"):
            swarm.network.resume(host)
        swarm.slow.clear()
        await swarm.wait_for_update(NUM_UPDATES)
        later = list_waits(swarm)[num_told:]
        assert not any("held-out" in what for what in later), later

    measure(open_held_out(folder), folder, scene)


def test_peer_that_joins_late_learns_the_held_out_loss(
    folder: Path, alone: dict[int, float]
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        await swarm.start("newcomer", 1)

    swarm = measure(open_held_out(folder), folder, scene)

    assert list_held_out(swarm, "newcomer")[NUM_UPDATES] == alone[NUM_UPDATES]
