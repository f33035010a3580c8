"""Who leads a run, and who becomes a member, while others are silent or end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_swarm import RunSwarm, change_manifest, make_identity, run_in_swarm
from training_runs import MODEL, open_run, train_alone
from virtual_time import VirtualClock, run_virtual

from shoal.peer.runs.questions import MemberAnswer, NoteBytes, ignore_bytes, make_question_id
from shoal.peer.runs.run_decisions import RunDecisions
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.errors import UnavailableError, UsageError
from shoal.protocol.ids import MemberId, ModelId
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import (
    PartsFetch,
    Question,
    StateFetch,
    StateFollows,
    StatePart,
    Vote,
)
from shoal.protocol.net.directory import Directory
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decision, Member
from shoal.protocol.runs.training_run import TrainingRun

NUM_UPDATES = 4


def run_scene(
    run: TrainingRun, folder: Path, scene: Callable[[RunSwarm], Awaitable[object]], num_peers: int
) -> None:
    """Let a scene happen among peers of all stages in turn; see that all updates are made."""

    async def finish(swarm: RunSwarm) -> None:
        await scene(swarm)
        await swarm.finish()

    run_in_swarm(run, folder, finish, num_peers=num_peers)


def list_leaders(swarm: RunSwarm) -> set[str]:
    return {host for host, peer in swarm.peers.items() if peer.loop.leader is not None}


def list_roster(swarm: RunSwarm, host: str) -> list[str]:
    decisions = swarm.peers[host].loop.decisions
    return [] if decisions is None else list(decisions.newest.roster)


def test_nobody_else_leads_and_updates_go_on_while_a_member_is_paused(
    run: TrainingRun, folder: Path
) -> None:
    leaders: set[str] = set()

    async def watch(swarm: RunSwarm) -> None:
        while True:
            leaders.update(list_leaders(swarm))
            await asyncio.sleep(0.1)

    async def scene(swarm: RunSwarm) -> None:
        paused = asyncio.Event()

        def pause(host: str) -> None:
            if host == "peer3":
                swarm.network.pause(host)
                paused.set()
            else:
                swarm.do_at(is_late_question, pause)

        def is_late_question(message: Message) -> bool:
            return isinstance(message, PartsFetch) and max(swarm.list_updates()) >= 1

        await swarm.wait_for_update(1)
        swarm.do_at(is_late_question, pause)
        await paused.wait()
        watching = asyncio.create_task(watch(swarm))
        await swarm.wait_for_update(NUM_UPDATES)
        watching.cancel()
        assert swarm.list_updates()[3] < NUM_UPDATES
        swarm.network.resume("peer3")

    run_scene(run, folder, scene, 4)

    assert leaders - {"peer3"} == {"peer0"}


def test_peer_that_was_left_out_says_that_the_run_has_gone_on_without_it(folder: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        swarm.network.pause("peer3")
        await swarm.wait_until(lambda: len(list_roster(swarm, "peer0")) == 3)
        swarm.network.resume("peer3")

        def list_waits() -> list[object]:
            events = [event for host, event in swarm.events if host == "peer3"]
            return [event.facts["what"] for event in events if event.name == "waiting_for"]

        what = "a place in the run, which has gone on without this peer"
        await swarm.wait_until(lambda: what in list_waits())

    run_scene(open_run(folder, num_updates=30)[0], folder, scene, 4)


def test_newcomers_that_end_at_once_do_not_end_the_run(run: TrainingRun, folder: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        newcomers = ("one0", "two0", "three0")

        def names_a_newcomer(message: Message) -> bool:
            return isinstance(message, PartsFetch) and len(list_roster(swarm, "peer0")) > 3

        killed = asyncio.Event()

        def kill(host: str) -> None:
            for newcomer in newcomers:
                swarm.kill_soon(newcomer)
            killed.set()

        await swarm.wait_for_update(1)
        swarm.do_at(names_a_newcomer, kill)
        await asyncio.gather(*(swarm.start(newcomer, 0) for newcomer in newcomers))
        await killed.wait()

    run_scene(run, folder, scene, 3)


def test_run_goes_on_beside_a_member_that_reaches_nobody_of_the_next_stage(folder: Path) -> None:
    untied = {**MODEL, "tie_word_embeddings": False}  # else it has to reach the last stage to sum
    run, _ = open_run(folder, num_updates=3, model=untied)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_until(lambda: len(swarm.peers) == 4 and min(swarm.list_updates()) >= 1)
        for host in ("peer1", "peer3"):
            swarm.network.partition("peer2", host)
        await swarm.finish()
        num_passed = [swarm.num_passed[host, 2] for host in ("peer0", "peer2")]
        assert num_passed == [run.parts_per_update, 0]

    run_scene(run, folder, scene, 4)


def test_run_goes_on_beside_a_member_that_applies_an_update_without_end(
    run: TrainingRun, folder: Path
) -> None:
    def falsify(message: Message) -> Message:
        return change_manifest(message, is_applying=True)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(2)  # how long members apply the first one is known then
        swarm.falsify["peer3"] = falsify

    run_scene(run, folder, scene, 4)


def is_ready(swarm: RunSwarm, host: str) -> bool:
    return host in swarm.peers and swarm.peers[host].loop.is_ready


@pytest.mark.parametrize("sleeper", ["peer3", pytest.param("peer0", marks=pytest.mark.thorough)])
def test_member_that_slept_while_all_others_became_other_processes_finds_back(
    folder: Path, sleeper: str
) -> None:
    run, corpus = open_run(folder, num_updates=10, stage_borders=[])
    digests: list[str] = []

    async def scene(swarm: RunSwarm) -> None:
        hosts = list(swarm.peers)
        swarm.slow = dict.fromkeys(hosts, 100.0)
        await swarm.wait_until(lambda: all(is_ready(swarm, host) for host in hosts))
        swarm.network.pause(sleeper)
        await swarm.wait_until(
            lambda: [event.name for _, event in swarm.events].count("member_left") == 3
        )
        for host in hosts:
            if host != sleeper:
                await swarm.kill(host)
                await swarm.start(host, 0)
                await swarm.wait_until(partial(is_ready, swarm, host))
        assert 0 < max(swarm.list_updates()) < run.num_updates
        swarm.network.resume(sleeper)
        digests.append(await swarm.finish())

    run_scene(run, folder, scene, 4)

    assert digests == [train_alone(run, corpus)]


def test_member_that_slept_while_its_run_was_begun_again_ends_and_says_so(
    run: TrainingRun, folder: Path
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        swarm.network.pause("peer2")
        for host in ("peer0", "peer1"):
            await swarm.kill(host)
        for host in ("peer0", "peer1"):
            await swarm.start(host, int(host[-1]), founds_run=host == "peer0")
        await swarm.wait_until(lambda: all(is_ready(swarm, host) for host in ("peer0", "peer1")))
        swarm.network.resume("peer2")
        with pytest.raises(UsageError, match=r"was begun again .* start this peer again"):
            await swarm.wait_for_end("peer2")
        await swarm.start("peer2", 0)

    run_scene(run, folder, scene, 3)


class OldReadings:
    """A directory whose readings of 30 s ago name another port of each peer."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        found = await self._directory.lookup(model_id)
        if max_age_seconds < 30.0:
            return found
        elsewhere = [replace(peer.endpoints[0], port=1) for peer in found]
        return [
            replace(peer, endpoints=(endpoint,))
            for peer, endpoint in zip(found, elsewhere, strict=True)
        ]


def test_member_that_came_back_at_another_port_is_dialled_there(folder: Path) -> None:
    run, _ = open_run(folder, num_updates=1, stage_borders=[])
    counts = ServiceCounts()

    async def main() -> None:
        swarm = RunSwarm(run, folder)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(swarm.close)
            members = await swarm.open_stranger("asking", stack, OldReadings, counts)
            await swarm.start("peer0", 0, founds_run=True)
            await swarm.finish()

            asked = StateFetch(make_question_id(), 1, StatePart.DIGEST)
            member = MemberId(f"{make_identity('peer0').peer_id}/1")
            (await members.ask(member, asked)).check_kind(StateFollows)

    run_virtual(main())

    assert counts.sent_bytes["runs"] > 0
    assert counts.received_bytes["runs"] > 0
    assert counts.count_traffic()[0] == 0  # a bound on what a peer serves does not count it


class LateReadings(OldReadings):
    """A directory that learns of peers two seconds after others."""

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self._told_at = VirtualClock().now() + 2.0

    async def lookup(self, model_id: ModelId, max_age_seconds: float = 0.0) -> list[Announcement]:
        is_told = VirtualClock().now() >= self._told_at
        return await self._directory.lookup(model_id) if is_told else []


def test_newcomer_is_sought_until_the_directory_tells_where_it_is(folder: Path) -> None:
    run, _ = open_run(folder, num_updates=1, stage_borders=[])

    async def main() -> None:
        swarm = RunSwarm(run, folder)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(swarm.close)
            await swarm.start("peer0", 0, founds_run=True)
            await swarm.finish()
            members = await swarm.open_stranger("asking", stack, LateReadings)

            asked = StateFetch(make_question_id(), 1, StatePart.DIGEST)
            member = MemberId(f"{make_identity('peer0').peer_id}/1")
            (await members.ask(member, asked)).check_kind(StateFollows)

    run_virtual(main())


class Switchboard:
    """Members in one process, of which some are silent."""

    def __init__(self) -> None:
        names = [MemberId(name) for name in "abcd"]
        commit = Commit(founder="a", compute_class="c1" * 32, update=0)
        first = Decision(0, bytes(32), tuple(Member(name, 0) for name in names), commit.encode())
        self.members = {
            name: RunDecisions(name, first, Line(self, name), VirtualClock(), 1) for name in names
        }
        self.silent: set[str] = set()


class Line:
    """The access of one member to the others."""

    def __init__(self, board: Switchboard, name: MemberId) -> None:
        self._board = board
        self._name = name

    async def ask(
        self,
        member: MemberId,
        question: Question,
        payload: bytes | memoryview = b"",
        most_bytes: int = 0,
        note_bytes: NoteBytes = ignore_bytes,
    ) -> MemberAnswer:
        await asyncio.sleep(0.002)
        if member in self._board.silent:
            await asyncio.sleep(10.0)
            raise UnavailableError("it is silent")
        assert isinstance(question, Vote)
        answer = self._board.members[member].vote(question, self._name)
        await asyncio.sleep(0.002)
        return MemberAnswer(answer)


def test_members_learn_a_decision_at_once_while_one_is_silent() -> None:
    async def main() -> tuple[list[int], float]:
        board = Switchboard()
        board.silent = {"b"}
        a = board.members[MemberId("a")]
        await a.decide(a.newest.make_next(a.newest.members, a.newest.value))
        decided_at = VirtualClock().now()
        for name in "cd":
            await board.members[MemberId(name)].changed.wait()
        seconds = VirtualClock().now() - decided_at
        await a.close()
        return [each.newest.number for each in board.members.values()], seconds

    numbers, seconds = run_virtual(main())

    assert numbers == [1, 0, 1, 1]
    assert seconds < 0.01
