"""`shoal export`: the weights of the newest committed update of a run that goes on, or is over."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from run_swarm import RunSwarm, make_identity, run_in_swarm
from training_runs import open_run
from virtual_time import VirtualClock, run_virtual

from shoal.cli.training.run_weights import (
    RunWeights,
    choose_decision,
    fetch_newest_weights,
    fetch_run_weights,
    visit_swarm,
)
from shoal.peer.engine.training.span_state import StateLayout
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.peer.runs.questions import (
    FAILURES,
    MemberAnswer,
    NoteBytes,
    ignore_bytes,
    make_question_id,
)
from shoal.peer.runs.remote_members import RemoteMembers
from shoal.protocol.errors import ErrorCode, RefusedError, UnavailableError
from shoal.protocol.ids import MemberId
from shoal.protocol.limits import MAX_DECISIONS
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import (
    Question,
    RunJoin,
    RunPiece,
    StateFetch,
    StatePart,
    Vote,
)
from shoal.protocol.messages.session import Queued
from shoal.protocol.net.tasks import cancel_all
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decided, Decision, Member
from shoal.protocol.runs.training_run import TrainingRun

NUM_UPDATES = 4
HOSTS = ("peer0", "peer1", "peer2", "peer3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def run(folder: Path) -> TrainingRun:
    return open_run(folder, num_updates=NUM_UPDATES)[0]


@pytest.fixture(scope="module")
def digests(run: TrainingRun, folder: Path) -> list[str]:
    """The digests of the weights after each number of updates, in one process."""
    whole = WholeRun(run)
    first = whole.compute_weights_digest()
    return [first, *(whole.compute_weights_digest() for _ in whole.train(open_run(folder)[1]))]


async def export(swarm: RunSwarm, notes: list[str] | None = None) -> RunWeights:
    network = swarm.make_network("exporter")
    async with visit_swarm(network, make_identity("exporter")) as presence:
        note = ([] if notes is None else notes).append
        return await fetch_run_weights(swarm.record, presence, VirtualClock(), note)


def test_all_stages_of_what_is_exported_are_of_one_update(
    run: TrainingRun, folder: Path, digests: list[str]
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        for update in range(NUM_UPDATES):
            await swarm.wait_for_update(update)
            exported = await export(swarm)
            assert exported.update >= update
            assert exported.digest == digests[exported.update]
        assert await swarm.finish() == digests[-1]

    run_in_swarm(run, folder, scene)


def test_export_tells_the_held_out_loss_of_an_update_that_has_one(folder: Path) -> None:
    run, shards = open_run(folder, num_updates=2, num_held_out=200)
    whole = WholeRun(run)
    for _ in whole.train(shards):
        pass

    async def scene(swarm: RunSwarm) -> None:
        await swarm.peers["peer3"].loop.is_over.wait()
        exported = await export(swarm)
        assert exported.held_out_loss == whole.measure_held_out_loss(shards)

    run_in_swarm(run, folder, scene)


def test_update_that_is_over_before_it_is_asked_for_is_followed_by_the_next_one(
    folder: Path,
) -> None:
    asked: list[int] = []
    run, shards = open_run(folder, num_updates=8)
    whole = WholeRun(run)
    digests = ["", *(whole.compute_weights_digest() for _ in whole.train(shards))]
    looked: list[RunJoin] = []

    def note_asked(message: Message) -> bool:
        if isinstance(message, StateFetch):
            asked.append(message.update)
        return False

    def is_last_look(message: Message) -> bool:
        if isinstance(message, RunJoin) and not message.compute_class:
            looked.append(message)
        return len(looked) == len(HOSTS)

    async def scene(swarm: RunSwarm) -> None:
        held = asyncio.Event()

        def hold(host: str) -> None:  # it gets all answers, but later
            swarm.network.pause("exporter")
            held.set()

        swarm.do_at(note_asked, lambda host: None)
        swarm.do_at(is_last_look, hold)
        await swarm.wait_for_update(1)
        exporting = asyncio.create_task(export(swarm))
        await held.wait()
        await swarm.wait_for_update(max(swarm.list_updates()) + 3)
        swarm.network.resume("exporter")
        exported = await exporting
        assert exported.digest == digests[exported.update]
        assert exported.update == max(asked) > min(asked)

    run_in_swarm(run, folder, scene)


def test_peer_that_sends_other_weights_is_named_and_its_mate_asked(
    run: TrainingRun, folder: Path, digests: list[str]
) -> None:
    def falsify(message: Message) -> Message:
        if not isinstance(message, RunPiece):
            return message
        return replace(
            message, tensor=replace(message.tensor, data=bytes(len(message.tensor.data)))
        )

    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        notes: list[str] = []
        swarm.falsify["peer1"] = falsify
        assert (await export(swarm, notes)).digest == digests[-1]
        (liar,) = [peer.loop.decisions for host, peer in swarm.peers.items() if host == "peer1"]
        assert liar is not None
        said = f"member {liar.member_id} sent other numbers than its digest tells"
        assert notes == [f"{said}: another one is asked"]
        swarm.falsify["peer3"] = falsify
        with pytest.raises(UnavailableError, match="stage 1 after update 4: member 12D3Koo"):
            await export(swarm)

    run_in_swarm(run, folder, scene)


def test_stage_that_nobody_holds_is_told(run: TrainingRun, folder: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        for host in ("peer1", "peer3"):
            await swarm.kill(host)
        with pytest.raises(UnavailableError, match="no peer hands over the weights of stage 1 af"):
            await export(swarm)

    run_in_swarm(run, folder, scene)


def test_run_is_exported_to_whom_its_owner_admits(
    run: TrainingRun, folder: Path, digests: list[str]
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        with pytest.raises(UnavailableError, match="the owner of the run does not admit this peer"):
            await export(swarm)

    run_in_swarm(run, folder, scene, admitted=HOSTS)

    async def admitted(swarm: RunSwarm) -> None:
        await swarm.finish()
        assert (await export(swarm)).digest == digests[-1]

    run_in_swarm(run, folder, admitted, admitted=(*HOSTS, "exporter"))


def test_peer_that_is_switched_off_does_not_hold_an_export_up(
    run: TrainingRun, folder: Path, digests: list[str]
) -> None:
    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        swarm.network.pause("peer3")
        async with asyncio.timeout(5.0):
            assert (await export(swarm)).digest == digests[-1]

    run_in_swarm(run, folder, scene)


def test_peer_that_tells_another_decision_than_most_is_not_believed(
    run: TrainingRun, folder: Path, digests: list[str]
) -> None:
    def lie(message: Message) -> Message:
        if not isinstance(message, Vote) or message.decided is None:
            return message
        liar = make_identity("peer3").peer_id
        members = tuple(Member(MemberId(f"{liar}/{stage}"), stage) for stage in (0, 1))
        true = message.decided.decision
        lied = replace(true, number=MAX_DECISIONS, members=members)
        return replace(message, decided=Decided(lied))

    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        swarm.falsify["peer3"] = lie
        assert (await export(swarm)).digest == digests[-1]

    run_in_swarm(run, folder, scene)


def test_only_what_more_than_half_tell_is_chosen() -> None:
    first = Decision(0, bytes(32), (Member(MemberId("a/1"), 0),), b"")
    second = first.make_next(first.members, b"")
    far = replace(second, number=MAX_DECISIONS)

    assert choose_decision([far]) == far
    assert choose_decision([first, second, second]) == second
    assert choose_decision([first, second]) is None
    assert choose_decision([first, second, far]) is None
    assert choose_decision([first, first, far, far]) is None


class FastRun:
    """A run whose updates are all over before a member is asked for one."""

    def __init__(self) -> None:
        self.update = 0

    async def ask_newest(self) -> list[Decision]:
        self.update += 1
        commit = Commit(update=self.update, sums=("0" * 64,), founder="a", compute_class="c1" * 32)
        return [Decision(1, bytes(32), (Member(MemberId("a/1"), 0),), commit.encode())]

    async def ask(
        self,
        member: MemberId,
        question: Question,
        payload: bytes | memoryview = b"",
        most_bytes: int = 0,
        note_bytes: NoteBytes = ignore_bytes,
    ) -> MemberAnswer:
        raise RefusedError(ErrorCode.BAD_VALUES, "it is over")


def test_export_of_updates_that_are_always_over_ends_and_says_what_it_does() -> None:
    notes: list[str] = []

    async def main() -> None:
        fast = FastRun()
        async with asyncio.timeout(3600.0):
            await fetch_newest_weights(fast, fast.ask_newest, [StateLayout({})], "", notes.append)

    with pytest.raises(UnavailableError, match="stage 0 after update 10: it is over"):
        run_virtual(main())

    assert len(notes) == 9
    assert notes[0].endswith(
        "stage 0 after update 1: it is over: the peers are asked again for the newest update"
    )


def test_member_that_says_it_is_at_work_between_pieces_is_refused(
    run: TrainingRun, folder: Path
) -> None:
    def stall(message: Message) -> Message:
        return Queued(message.question, 0, 1.0) if isinstance(message, RunPiece) else message

    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        for host in HOSTS:
            swarm.falsify[host] = stall
        with pytest.raises(UnavailableError, match="Queued came where a piece belongs"):
            await export(swarm)

    run_in_swarm(run, folder, scene)


def test_strangers_do_not_keep_a_peer_that_leaves_or_is_done(
    run: TrainingRun, folder: Path
) -> None:
    async def ask(swarm: RunSwarm, members: RemoteMembers, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        decisions = swarm.peers["peer0"].loop.decisions
        assert decisions is not None
        while True:  # it waits for an update that does not come
            question = StateFetch(make_question_id(), NUM_UPDATES + 1, StatePart.DIGEST)
            with contextlib.suppress(*FAILURES):
                await members.ask(decisions.newest.roster[0], question)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.finish()
        async with AsyncExitStack() as stack:
            members = await swarm.open_stranger("stranger", stack)
            asking = [asyncio.create_task(ask(swarm, members, delay)) for delay in (0.0, 15.0)]
            stack.push_async_callback(cancel_all, asking)
            await asyncio.sleep(20.0)
            async with asyncio.timeout(1.0):
                await swarm.peers["peer0"].leave()
            lingering = asyncio.create_task(swarm.peers["peer0"].linger())
            await asyncio.sleep(1.0)
            VirtualClock().stall(600.0)
            async with asyncio.timeout(20.0):
                await lingering

    run_in_swarm(run, folder, scene)
