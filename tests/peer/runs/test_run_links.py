"""Runs of which two members cannot talk to each other: one of them is put aside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from run_swarm import RunSwarm, change_manifest, make_identity, run_in_swarm
from training_runs import MODEL, open_run, train_alone

from shoal.peer.runs.questions import MemberAnswer
from shoal.protocol.errors import ErrorCode, UsageError
from shoal.protocol.ids import PeerId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import Reduced, Reduction, Sums, Vote
from shoal.protocol.messages.session import Declined
from shoal.protocol.runs.training_run import TrainingRun

NUM_UPDATES = 4


@pytest.fixture(scope="module")
def untied(folder: Path) -> tuple[TrainingRun, str]:
    """A run of which only members of one stage sum together, and its digest."""
    model = {**MODEL, "tie_word_embeddings": False}
    run, shards = open_run(folder, num_updates=NUM_UPDATES, model=model)
    return run, train_alone(run, shards)


def run_cut(
    run: TrainingRun,
    folder: Path,
    num_peers: int,
    pairs: list[tuple[str, str]],
    check: Callable[[RunSwarm], Awaitable[None]],
) -> str:
    """Cut links once an update is committed, and check what has happened by the last one; return
    the digest of the weights.
    """

    async def scene(swarm: RunSwarm) -> str:
        await swarm.wait_until(lambda: min(swarm.list_updates()) >= 1)
        for pair in pairs:
            swarm.network.partition(*pair)
        await swarm.wait_for_update(NUM_UPDATES)
        await check(swarm)
        return await swarm.finish()

    return run_in_swarm(run, folder, scene, num_peers=num_peers)


def list_aside(swarm: RunSwarm) -> list[tuple[str, list[str]]]:
    """Return the hosts that were put aside, each with those that it and they complain about."""
    hosts = {make_identity(host).peer_id: host for host in (f"peer{num}" for num in range(6))}
    aside: list[tuple[str, list[str]]] = []
    for _, event in swarm.events:
        if event.name == "put_aside":
            peer, *others = [
                hosts[each]
                for each in [
                    cast(PeerId, event.facts["peer"]),
                    *cast(list[PeerId], event.facts["others"]),
                ]
            ]
            aside.append((peer, others))
    return aside


def list_waits(swarm: RunSwarm, host: str) -> list[str]:
    """Return what a host has said that it waits for."""
    told = [event for one, event in swarm.events if (one, event.name) == (host, "waiting_for")]
    return [str(event.facts["what"]) for event in told]


async def cut_off_mate(swarm: RunSwarm, slow: float) -> None:
    """Have the later one of two mates put aside, as they cannot talk; all are slow from then on."""
    await swarm.wait_until(lambda: min(swarm.list_updates()) >= 1)
    swarm.network.partition("peer1", "peer3")
    await swarm.wait_until(lambda: bool(list_aside(swarm)))
    assert list_aside(swarm) == [("peer3", ["peer1"])]
    swarm.slow = dict.fromkeys(swarm.peers, slow)
    mate = make_identity("peer1").peer_id[-8:]
    why = f"put aside: it and …{mate} cannot read from each other; it may join again in "
    await swarm.wait_until(lambda: any(why in what for what in list_waits(swarm, "peer3")))


def test_later_one_of_two_mates_that_cannot_talk_rests_and_comes_back(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    run, digest = untied

    async def scene(swarm: RunSwarm) -> str:
        await cut_off_mate(swarm, 1000.0)  # the run takes longer than the rest
        swarm.network.heal("peer1", "peer3")
        await asyncio.sleep(60.0)
        assert swarm.list_updates()[3] == 1
        await swarm.wait_until(lambda: swarm.list_updates()[3] > 1)
        swarm.slow.clear()
        digest = await swarm.finish()
        assert swarm.num_passed["peer3", NUM_UPDATES - 1]
        waits = [what for what in list_waits(swarm, "peer3") if "a place in the run: " in what]
        assert len(waits) == 1  # it asks again behind its rest
        return digest

    assert run_in_swarm(run, folder, scene) == digest


def test_peer_that_rests_when_the_run_ends_is_told_at_once(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    run, digest = untied

    async def scene(swarm: RunSwarm) -> str:
        await cut_off_mate(swarm, 200.0)
        await swarm.wait_for_update(NUM_UPDATES)
        swarm.network.heal("peer1", "peer3")
        async with asyncio.timeout(5.0):  # half of what the others stay for
            await swarm.peers["peer3"].loop.is_over.wait()
        _, digest = await swarm.peers["peer3"].loop.fetch_weights()
        return digest

    assert run_in_swarm(run, folder, scene) == digest


def test_peer_that_rests_ends_when_all_members_are_gone(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    run, _ = untied

    async def scene(swarm: RunSwarm) -> None:
        await cut_off_mate(swarm, 200.0)
        for host in ("peer0", "peer1", "peer2"):
            await swarm.kill(host)
        await swarm.start("stranger", 0)  # announces the run, too
        for host in ("peer3", "stranger"):
            with pytest.raises(UsageError, match=r"none of its members was found for 300 s"):
                await swarm.wait_for_end(host)

    run_in_swarm(run, folder, scene)


@pytest.mark.parametrize("is_endless", [False, True])
def test_mate_that_is_busy_is_put_aside_only_where_it_does_not_sum_in_three_attempts(
    folder: Path, untied: tuple[TrainingRun, str], is_endless: bool
) -> None:
    run, digest = untied

    async def scene(swarm: RunSwarm) -> str:
        await swarm.wait_until(lambda: min(swarm.list_updates()) >= 1)
        stage = swarm.peers["peer3"].loop.stage
        assert stage is not None
        reduce, is_free = stage.reduce, asyncio.Event()

        async def reduce_later(question: Reduction) -> MemberAnswer:
            await is_free.wait()  # as a part that nobody waits for any more is computed here
            return await reduce(question)

        stage.reduce = reduce_later
        if is_endless:
            await swarm.wait_until(lambda: bool(list_aside(swarm)))
            await swarm.kill("peer3")
        else:
            await asyncio.sleep(500.0)  # longer than two deadlines, as each is twice the last one
            is_free.set()
        digest = await swarm.finish()
        assert list_aside(swarm) == ([("peer3", [])] if is_endless else [])
        return digest

    assert run_in_swarm(run, folder, scene) == digest


def test_run_goes_on_when_members_of_both_ends_cannot_talk_and_sum_tied_weights(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    async def check(swarm: RunSwarm) -> None:
        assert list_aside(swarm) == [("peer3", ["peer2"])]
        await swarm.kill("peer3")

    assert run_cut(run, folder, 4, [("peer2", "peer3")], check) == quiet_digest


def test_member_that_none_of_its_mates_can_talk_to_is_put_aside_though_it_came_first(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    async def check(swarm: RunSwarm) -> None:
        assert list_aside(swarm) == [("peer1", ["peer3", "peer5"])]
        await swarm.kill("peer1")

    run, digest = untied
    assert run_cut(run, folder, 6, [("peer1", "peer3"), ("peer1", "peer5")], check) == digest


def test_member_that_names_its_mates_without_a_reason_is_put_aside_itself(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    run, digest = untied

    async def scene(swarm: RunSwarm) -> str:
        def falsify(message: Message) -> Message:
            decisions = swarm.peers["peer1"].loop.decisions
            if decisions is None:
                return message
            return change_manifest(message, unreachable=tuple(decisions.list_members(1)[1:]))

        await swarm.wait_until(lambda: min(swarm.list_updates()) >= 1)
        swarm.falsify["peer1"] = falsify
        await swarm.wait_for_update(NUM_UPDATES)
        assert list_aside(swarm) == [("peer1", ["peer3", "peer5"])]
        await swarm.kill("peer1")
        return await swarm.finish()

    assert run_in_swarm(run, folder, scene, num_peers=6) == digest


def test_member_stays_when_one_newcomer_after_the_other_cannot_be_read_from(folder: Path) -> None:
    run, _ = open_run(folder, num_updates=20, model={**MODEL, "tie_word_embeddings": False})

    async def scene(swarm: RunSwarm) -> str:
        for number, newcomer in enumerate(("peer3", "peer5"), start=1):
            await swarm.start(newcomer, 1)
            await swarm.wait_until(lambda name=newcomer: takes_part(swarm, name))
            swarm.network.partition("peer1", newcomer)
            await swarm.wait_until(lambda num=number: len(list_aside(swarm)) == num)
            await swarm.kill(newcomer)
        assert list_aside(swarm) == [("peer3", ["peer1"]), ("peer5", ["peer1"])]
        return await swarm.finish()

    run_in_swarm(run, folder, scene, num_peers=3)


@pytest.mark.parametrize(
    ("fault", "num_peers"),
    [("memory", 3), ("memory", 6), ("refusal", 6), ("late refusal", 3), ("late refusal", 6)],
)
def test_member_that_does_not_sum_is_put_aside_unless_it_is_the_last_of_its_stage(
    folder: Path, untied: tuple[TrainingRun, str], fault: str, num_peers: int
) -> None:
    run, digest = untied

    def falsify(message: Message) -> Message:
        if fault == "refusal" and isinstance(message, Sums):
            return Declined(message.question, 0, ErrorCode.BUSY, "no")
        if fault == "late refusal" and isinstance(message, Reduced):
            return Declined(message.question, 0, ErrorCode.NEXT_UNREACHABLE, "no")
        return message

    async def scene(swarm: RunSwarm) -> str:
        await swarm.wait_until(lambda: min(swarm.list_updates()) >= 1)
        if fault == "memory":
            swarm.without_memory.add("peer1")
        else:
            swarm.falsify["peer1"] = falsify
        if num_peers == 3:
            what = f"the peer …{make_identity('peer1').peer_id[-8:]} to sum its gradients"
            await swarm.wait_until(lambda: any(what in str(e.facts) for _, e in swarm.events))
            await swarm.start("peer3", 1)
        await swarm.wait_for_update(NUM_UPDATES)
        assert [host for host, _ in list_aside(swarm)] == ["peer1"]
        await swarm.kill("peer1")
        return await swarm.finish()

    assert run_in_swarm(run, folder, scene, num_peers=num_peers) == digest


def test_newcomer_that_is_told_to_stay_away_for_ever_asks_again(
    folder: Path, untied: tuple[TrainingRun, str]
) -> None:
    run, digest = untied

    def refuse(message: Message) -> Message:
        if not isinstance(message, Vote):
            return message
        return Declined(message.question, 0, ErrorCode.LEFT_OUT, "go away", 1e6)

    async def scene(swarm: RunSwarm) -> str:
        swarm.falsify["peer0"] = refuse
        await swarm.start("peer1", 1)
        await swarm.wait_until(lambda: any("go away" in str(e.facts) for _, e in swarm.events))
        del swarm.falsify["peer0"]
        return await swarm.finish()

    assert run_in_swarm(run, folder, scene, num_peers=1) == digest


def takes_part(swarm: RunSwarm, host: str) -> bool:
    return any(num for (one, _), num in swarm.num_passed.items() if one == host)
