"""Stages answer repeated, stale and malformed questions, and refuse invalid gradients and sums."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from training_runs import open_run
from virtual_time import VirtualClock, run_virtual

from shoal.kernels.wire_tensors import encode_tensor
from shoal.peer.engine.training.part_tensors import encode
from shoal.peer.engine.training.span_state import StateLayout
from shoal.peer.process.config import ignore
from shoal.peer.runs.questions import MemberAnswer, NoteBytes, ignore_bytes, make_question_id
from shoal.peer.runs.remote_members import RemoteMembers
from shoal.peer.runs.run_decisions import RunDecisions
from shoal.peer.runs.run_resources import RunPeerConfig, RunResources, WatchedCompute
from shoal.peer.runs.stage import Stage
from shoal.peer.runs.state_transfer import FetchedState, fetch_state
from shoal.peer.runs.training_loop import TrainingLoop
from shoal.protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, UnavailableError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import MemberId
from shoal.protocol.messages.runs import (
    HeldOutPass,
    HeldOutPassed,
    PartPass,
    PartPassed,
    Question,
    Reduced,
    Reduction,
    StateFetch,
    StateFollows,
    StatePart,
    SumFetch,
    Sums,
)
from shoal.protocol.runs.commits import Commit
from shoal.protocol.runs.decisions import Decision, Member
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.update_parts import pack_parts

OWN, LIAR, MATE = (MemberId(name) for name in ("own/1", "liar/2", "mate/3"))
SHAPE = (2, 16, 32)
INPUTS = torch.full(SHAPE, 0.5)


Answer = Callable[[MemberId, Question], Awaitable[MemberAnswer]]


class Others:
    """The other members, which answer as a test says."""

    def __init__(self, answer: Answer | None) -> None:
        self._answer = answer

    async def ask(
        self,
        member: MemberId,
        question: Question,
        payload: Any = b"",
        most_bytes: int = 0,
        note_bytes: NoteBytes = ignore_bytes,
    ) -> MemberAnswer:
        assert self._answer is not None
        return await self._answer(member, question)


async def build_stage(
    folder: Path,
    index: int,
    answer: Answer | None = None,
    own: MemberId = OWN,
    note: Callable[[str], None] = lambda name: None,
) -> Stage:
    """Build a stage of a run of two. `note` hears the name of a function before it is computed."""
    return await Stage.build(
        open_resources(folder, note), index, own, Others(answer),
        lambda index: [OWN, LIAR, MATE][1 - index :],
    )  # fmt: skip


def open_resources(
    folder: Path,
    note: Callable[[str], None] = lambda name: None,
    graph_bytes: int = 2**30,
    **changes: Any,
) -> RunResources:
    """Return what a member needs of a run of two stages, of which some settings are replaced."""
    run, _ = open_run(folder, num_held_out=200, **changes)

    async def compute(function: Callable[[], Any]) -> Any:
        note(getattr(getattr(function, "func", function), "__name__", ""))
        await asyncio.sleep(0.01)
        return function()

    watched = WatchedCompute(compute, VirtualClock(), 10.0)
    config = RunPeerConfig(sign_run(Identity(bytes(32)), run), folder, graph_bytes=graph_bytes)
    return RunResources.open(config, watched, "c1" * 32)


def with_stage(
    folder: Path,
    index: int,
    scene: Callable[[Stage], Awaitable[None]],
    answer: Answer | None = None,
) -> None:
    """Build a stage of a run of two, and let something happen to it."""

    async def main() -> None:
        await scene(await build_stage(folder, index, answer))

    run_virtual(main())


def make_pass(update: int = 0, index: int = 0) -> PartPass:
    return PartPass(make_question_id(), INPUTS.nbytes, update, index, last_stage=1)


@pytest.mark.parametrize(
    ("question", "inputs", "complaint"),
    [
        (make_pass(), INPUTS[:, :8], "2048 bytes are no activations of this stage"),
        (make_pass(), INPUTS / 0, "the inputs are not finite"),
        (make_pass(index=9), INPUTS, "an update has no part 9"),
    ],
)
def test_wrong_part_is_refused_and_not_counted(
    tmp_path: Path, question: PartPass, inputs: torch.Tensor, complaint: str
) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(RefusedError, match=complaint):
            await stage.pass_part(question, encode_tensor(inputs.contiguous()))
        assert not stage.counted
        assert not stage.refused

    with_stage(tmp_path, 1, scene)


@pytest.mark.parametrize(
    ("changes", "inputs", "complaint"),
    [
        ({}, INPUTS[:, :8], "2048 bytes are no activations of this stage"),
        ({"index": 6}, INPUTS, "the run has no held-out part 6"),
        ({"update": 1}, INPUTS, "this member has not come to update 1 yet"),
    ],
)
def test_wrong_held_out_part_is_refused(
    tmp_path: Path, changes: dict[str, Any], inputs: torch.Tensor, complaint: str
) -> None:
    question = HeldOutPass(make_question_id(), INPUTS.nbytes, 0, 0)

    async def scene(stage: Stage) -> None:
        with pytest.raises(RefusedError, match=complaint):
            await stage.evaluate(replace(question, **changes), encode_tensor(inputs.contiguous()))
        passed = await stage.evaluate(question, encode_tensor(INPUTS))
        assert passed.check_kind(HeldOutPassed).loss > 0

    with_stage(tmp_path, 1, scene)


def test_held_out_part_without_a_member_of_the_next_stage_is_refused(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(RefusedError, match="no member of stage 1"):
            await stage.evaluate(HeldOutPass(make_question_id(), 0, 0, 0), b"")

    with_stage(tmp_path, 0, scene)


def test_replayed_part_is_counted_once_and_a_zombie_of_an_old_update_refused(
    tmp_path: Path,
) -> None:
    async def scene(stage: Stage) -> None:
        for index in (0, 1):
            await stage.pass_part(make_pass(index=index), encode_tensor(INPUTS))
        sums = {name: total.units.clone() for name, total in stage.span.sums.items()}

        await stage.pass_part(make_pass(), encode_tensor(INPUTS * 1000))

        assert all(sums[name].equal(total.units) for name, total in stage.span.sums.items())
        with pytest.raises(RefusedError, match="other parts are counted here"):
            await stage.reduce(order_sums({0, 1, 2}))
        reduced = (await stage.reduce(order_sums({0, 1}))).check_kind(Reduced)
        assert await stage.apply(make_commit(reduced))
        with pytest.raises(RefusedError, match="update 0 is over, 1 is under way"):
            await stage.pass_part(make_pass(index=2), encode_tensor(INPUTS))
        assert not stage.counted

    with_stage(tmp_path, 1, scene)


def test_update_that_begins_again_counts_no_part_that_was_ordered_before(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.pass_part(make_pass(), encode_tensor(INPUTS))
        running = asyncio.create_task(stage.pass_part(make_pass(index=1), encode_tensor(INPUTS)))
        await asyncio.sleep(0)

        await stage.begin_again(1)

        with pytest.raises(RefusedError, match="this member goes on with another update"):
            await running
        assert not stage.counted
        assert not any(total.units.any() for total in stage.span.sums.values())
        with pytest.raises(RefusedError, match="update 0 was begun again since part 2 was ordered"):
            await stage.pass_part(make_pass(index=2), encode_tensor(INPUTS))
        await stage.pass_part(replace(make_pass(), num_restarts=1), encode_tensor(INPUTS))
        assert set(stage.counted) == {part.index for part in stage.span.counted} == {0}

    with_stage(tmp_path, 1, scene)


def test_audit_counts_nothing_and_tells_the_same_as_who_has_counted_the_part(
    tmp_path: Path,
) -> None:
    async def scene(stage: Stage) -> None:
        audit = replace(make_pass(), is_audit=True)
        await stage.pass_part(audit, encode_tensor(INPUTS))
        assert not stage.counted
        assert not any(total.units.any() for total in stage.span.sums.values())
        audited = dict(stage.audited)

        await stage.pass_part(make_pass(), encode_tensor(INPUTS))
        assert stage.counted == stage.audited == audited

        await stage.pass_part(audit, encode_tensor(INPUTS * 2))
        assert stage.counted == audited
        assert stage.audited != audited

    with_stage(tmp_path, 1, scene)


def test_member_that_lacks_a_part_or_a_mate_refuses_an_audit(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        hand_on = replace(make_pass(), num_bytes=0, is_audit=True)
        with pytest.raises(RefusedError, match="part 0 of update 0 is not counted here"):
            await stage.pass_part(hand_on, b"")
        with pytest.raises(RefusedError, match="an audit ends before its last member"):
            await stage.pass_part(replace(hand_on, last_stage=0), b"")
        assert not stage.audited

    with_stage(tmp_path, 0, scene)


def test_part_of_an_update_that_is_over_does_not_get_the_gradients_of_the_next_one(
    tmp_path: Path,
) -> None:
    async def scene(stage: Stage) -> None:
        reduced = (await stage.reduce(order_sums(set()))).check_kind(Reduced)
        first = asyncio.create_task(stage.pass_part(make_pass(), encode_tensor(INPUTS)))
        await asyncio.sleep(0)
        again = asyncio.create_task(stage.pass_part(make_pass(), encode_tensor(INPUTS)))
        early = make_pass(update=1)
        following = asyncio.create_task(stage.pass_part(early, encode_tensor(INPUTS)))
        await stage.apply(make_commit(reduced))  # others have computed it all meanwhile

        with pytest.raises(RefusedError, match="this member goes on with another update"):
            await first
        with pytest.raises(RefusedError, match="update 0 is over, 1 is under way"):
            await again
        await following

    with_stage(tmp_path, 1, scene)


def test_part_that_comes_while_a_state_is_loaded_is_counted_behind_it(tmp_path: Path) -> None:
    async def main() -> None:
        passing: list[asyncio.Task[MemberAnswer]] = []
        mate = await build_stage(tmp_path, 1, own=MATE)

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, StateFetch)
            return await mate.read_state(question)

        def note(name: str) -> None:
            if name == "_load_state":
                asking = stage.pass_part(make_pass(), encode_tensor(INPUTS))
                passing.append(asyncio.create_task(asking))

        stage = await build_stage(tmp_path, 1, answer, note=note)
        await stage.pass_part(make_pass(index=1), encode_tensor(INPUTS))
        await stage.load(await stage.fetch_state(0))
        await asyncio.wait(passing)
        await asyncio.sleep(1.0)  # what is computed for nobody any more comes to its end

        assert {part.index for part in stage.span.counted} == set(stage.counted) == {0}

    run_virtual(main())


def test_part_that_is_counted_while_others_are_summed_is_not_in_their_loss(tmp_path: Path) -> None:
    async def main() -> None:
        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, SumFetch)
            await stage.pass_part(make_pass(index=1), encode_tensor(INPUTS))
            numbers = bytes((4 if question.is_reduced else 8) * (question.stop - question.start))
            return MemberAnswer(Sums(question.question, len(numbers)), numbers)

        stage = await build_stage(tmp_path, 1, answer)
        passed = await stage.pass_part(make_pass(index=0), encode_tensor(INPUTS))
        reduced = (await stage.reduce(order_sums({0}, MATE))).check_kind(Reduced)

        assert set(stage.counted) == {0, 1}
        assert reduced.loss == passed.check_kind(PartPassed).loss > 0

    run_virtual(main())


def test_attempts_of_two_leaders_that_cross_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        stages: dict[MemberId, Stage] = {}

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, SumFetch)
            await asyncio.sleep(0.01)
            return await stages[member].read_sums(question)

        for member in (OWN, MATE):
            stages[member] = await build_stage(tmp_path, 1, answer, member)

        async def reduce(member: MemberId, attempt: int) -> Reduced:
            order = order_sums(set(), MATE, attempt=attempt)
            return (await stages[member].reduce(order)).check_kind(Reduced)

        crossing = [asyncio.create_task(reduce(*each)) for each in ((OWN, 1), (MATE, 2))]
        await asyncio.sleep(0.02)
        crossing += [asyncio.create_task(reduce(*each)) for each in ((OWN, 2), (MATE, 1))]
        for failed in await asyncio.gather(*crossing, return_exceptions=True):
            assert isinstance(failed, RefusedError | UnavailableError)

        one, other = await asyncio.gather(reduce(OWN, 3), reduce(MATE, 3))
        assert one.digest == other.digest

        late = asyncio.create_task(reduce(OWN, 4))  # the mate goes on without it
        await asyncio.sleep(0.05)
        assert await stages[MATE].apply(make_commit(one))
        with pytest.raises(UnavailableError, match="update 0 is over"):
            await late

    run_virtual(main())


def order_sums(parts: set[int], *mates: MemberId, attempt: int = 0) -> Reduction:
    return Reduction(make_question_id(), 0, bytes([attempt] * 16), pack_parts(parts), (OWN, *mates))


def make_commit(reduced: Reduced) -> Commit:
    """Return the commit of the first update, in which stage 1 has these sums."""
    sums = ("0" * 64, reduced.digest.hex())
    return Commit(update=1, sums=sums, squared_norm=1.0, founder="a", compute_class="0" * 64)


@pytest.mark.parametrize(
    "lie",
    [
        lambda numbers: numbers * float("nan"),
        lambda numbers: numbers + 0.5,
        lambda numbers: numbers + 2.0**53,
        lambda numbers: numbers[1:],
    ],
)
def test_numbers_that_are_no_sum_of_gradients_are_refused_by_name(
    tmp_path: Path, lie: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    async def answer(member: MemberId, question: Question) -> MemberAnswer:
        assert isinstance(question, SumFetch)
        numbers = lie(torch.zeros(question.stop - question.start, dtype=torch.float64))
        data = numbers.numpy().tobytes()
        return MemberAnswer(Sums(question.question, len(data)), data)

    async def scene(stage: Stage) -> None:
        with pytest.raises(RemoteProtocolError, match="liar/2 sent no sum of gradients"):
            await stage.reduce(order_sums(set(), LIAR, MATE))
        assert stage.sums.accused == {LIAR, MATE}  # where all do, it is known who is wrong

    with_stage(tmp_path, 1, scene, answer)


def test_mate_that_refuses_its_sums_is_named_until_it_leaves(tmp_path: Path) -> None:
    async def answer(member: MemberId, question: Question) -> MemberAnswer:
        assert isinstance(question, SumFetch)
        if member == LIAR:
            raise RefusedError(ErrorCode.BUSY, "no")
        numbers = bytes((4 if question.is_reduced else 8) * (question.stop - question.start))
        return MemberAnswer(Sums(question.question, len(numbers)), numbers)

    async def scene(stage: Stage) -> None:
        async def fail(attempt: int) -> list[MemberId]:
            with pytest.raises(UnavailableError, match="a mate refuses: no"):
                await stage.reduce(order_sums(set(), LIAR, MATE, attempt=attempt))
            return stage.sums.unreachable

        named = [await fail(1), await fail(2)]
        stage.sums.forget_others([OWN, LIAR])
        named.append(stage.sums.unreachable)
        stage.sums.forget_others([OWN, MATE])
        assert [*named, await fail(3), await fail(4)] == [[], [LIAR], [LIAR], [], [LIAR]]

    with_stage(tmp_path, 1, scene, answer)


@pytest.mark.parametrize("lie", [INPUTS[:, :8], INPUTS / 0])
def test_wrong_gradients_of_a_mate_are_asked_of_another_one(
    tmp_path: Path, lie: torch.Tensor
) -> None:
    async def answer(member: MemberId, question: Question) -> MemberAnswer:
        data = encode_tensor(lie.contiguous() if member == LIAR else torch.zeros(SHAPE))
        passed = PartPassed(question.question, len(data), 1.0, (member,))
        return MemberAnswer(passed, data)

    async def scene(stage: Stage) -> None:
        question = replace(make_pass(), num_bytes=0, route=(LIAR,))
        answered = await stage.pass_part(question, b"")
        assert answered.check_kind(PartPassed).route == (OWN, MATE)
        assert stage.accused == {LIAR}

    with_stage(tmp_path, 0, scene, answer)


@pytest.mark.parametrize("graph_bytes", [0, 2**30])
def test_graphs_of_parts_under_way_stay_within_the_limit_of_the_member(
    tmp_path: Path, graph_bytes: int
) -> None:
    async def main() -> None:
        seen: list[int] = []

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            seen.append(stage.span.graph_bytes)
            data = encode_tensor(torch.zeros(SHAPE))
            return MemberAnswer(PartPassed(question.question, len(data), 1.0, (member,)), data)

        resources = open_resources(tmp_path, graph_bytes=graph_bytes)
        stage = await Stage.build(resources, 0, OWN, Others(answer), lambda index: [LIAR])
        await stage.pass_part(replace(make_pass(), num_bytes=0), b"")

        assert set(stage.counted) == {0}
        assert [num_bytes > 0 for num_bytes in seen] == [graph_bytes > 0]

    run_virtual(main())


def test_replicas_round_the_gradients_of_a_part_alike_and_those_of_another_one_otherwise(
    tmp_path: Path,
) -> None:
    grads = encode("int8", torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
    inputs = encode("int8", INPUTS)

    async def answer(member: MemberId, question: Question) -> MemberAnswer:
        return MemberAnswer(PartPassed(question.question, len(grads), 1.0, (member,)), grads)

    async def main() -> None:
        resources = open_resources(tmp_path, mode="int8", stage_borders=[1, 2])

        async def pass_parts(own: MemberId) -> list[bytes]:
            stage = await Stage.build(resources, 1, own, Others(answer), lambda index: [LIAR])
            passed: list[bytes] = []
            for index in (0, 1):  # in the same activations and gradients
                question = PartPass(
                    make_question_id(), len(inputs), 0, index, last_stage=2, wants_gradients=True
                )
                passed.append(bytes((await stage.pass_part(question, inputs)).payload))
            return passed

        own, mate = await pass_parts(OWN), await pass_parts(MATE)
        assert own == mate
        assert own[0] != own[1]

    run_virtual(main())


def test_state_is_taken_from_another_mate_where_one_sends_other_numbers_than_its_digest(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        holder = await build_stage(tmp_path, 1)
        await holder.pass_part(make_pass(), encode_tensor(INPUTS))
        reduced = (await holder.reduce(order_sums({0}))).check_kind(Reduced)
        assert await holder.apply(make_commit(reduced))
        asked: list[MemberId] = []

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, StateFetch)
            told = await holder.read_state(question)
            if question.part is not StatePart.ALL:
                return told
            asked.append(member)
            data = bytearray(told.payload)
            data[-1] ^= member == LIAR
            return replace(told, payload=memoryview(data))

        joining = await build_stage(tmp_path, 1, answer, MemberId("joiner/4"))
        while LIAR not in asked:  # who gives its state is drawn
            asked.clear()
            await joining.load(await joining.fetch_state(1))
            assert asked[-1] != LIAR
            assert joining.digest == holder.digest

    run_virtual(main())


def test_all_that_fetch_the_same_state_get_one_copy(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async def read(part: StatePart) -> MemberAnswer:
            update = stage.update
            return await stage.read_state(StateFetch(make_question_id(), update, part))

        first, second = await asyncio.gather(read(StatePart.ALL), read(StatePart.ALL))
        assert first.payload is second.payload
        weights = await read(StatePart.WEIGHTS)
        assert 0 < len(weights.payload) < len(first.payload)
        assert not (await read(StatePart.DIGEST)).payload
        reduced = (await stage.reduce(order_sums(set()))).check_kind(Reduced)
        sums = ("0" * 64, reduced.digest.hex())
        commit = Commit(update=1, sums=sums, squared_norm=0.0, founder="a", compute_class="0" * 64)
        assert await stage.apply(commit)
        with pytest.raises(RefusedError, match="still sends the state of another update"):
            await read(StatePart.ALL)
        del first, second
        assert (await read(StatePart.ALL)).payload

    with_stage(tmp_path, 1, scene)


def test_weights_of_two_updates_at_most_are_being_sent(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async def read() -> MemberAnswer:
            question = StateFetch(make_question_id(), stage.update, StatePart.WEIGHTS)
            return await stage.read_state(question)

        async def advance() -> None:
            order = replace(order_sums(set()), update=stage.update)
            reduced = (await stage.reduce(order)).check_kind(Reduced)
            commit = make_commit(reduced).model_copy(update={"update": stage.update + 1})
            assert await stage.apply(commit)

        first = await read()
        await advance()
        second = await read()
        await advance()
        with pytest.raises(RefusedError, match="still sends the state of another update"):
            await read()
        assert first.payload is not second.payload
        del first
        assert (await read()).payload

    with_stage(tmp_path, 1, scene)


def test_state_is_fetched_while_another_holder_tells_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        holder = await build_stage(tmp_path, 1)

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, StateFetch)
            if member == LIAR:
                await asyncio.Event().wait()
            return await holder.read_state(question)

        async def compute(function: Callable[[], Any]) -> Any:
            return function()

        layout = StateLayout(holder.span.read_state())
        fetched = await fetch_state(
            Others(answer), (LIAR, MATE), 0, StatePart.ALL, layout, compute, print
        )
        assert fetched.digest == holder.digest

    run_virtual(main())


def test_holders_of_other_states_are_noted_and_the_first_one_counts(tmp_path: Path) -> None:
    async def main() -> None:
        holder = await build_stage(tmp_path, 1)
        notes: list[str] = []

        async def answer(member: MemberId, question: Question) -> MemberAnswer:
            assert isinstance(question, StateFetch)
            told = await holder.read_state(question)
            follows = told.check_kind(StateFollows)
            return (
                told
                if member == MATE
                else replace(told, message=replace(follows, digest=bytes(32)))
            )

        async def compute(function: Callable[[], Any]) -> Any:
            return function()

        layout = StateLayout(holder.span.read_state())
        fetched = await fetch_state(
            Others(answer), (MATE, LIAR), 0, StatePart.ALL, layout, compute, notes.append,
            rng=random.Random(0),
        )  # fmt: skip
        assert fetched.digest == holder.digest
        assert notes == [
            "before update 0, the states of …liar differ from those of …mate, "
            "which count as …mate came first: nothing shows that they are right"
        ]

    run_virtual(main())


def test_part_goes_on_when_a_state_is_not_loaded(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        fetched = FetchedState(1, stage.span.read_state(), stage.digest)  # it is that of update 0
        loading = asyncio.create_task(stage.load(fetched))
        await asyncio.sleep(0)
        await stage.pass_part(make_pass(), encode_tensor(INPUTS))

        with pytest.raises(UnavailableError, match="not the state before update 1"):
            await loading
        assert set(stage.counted) == {0}

    with_stage(tmp_path, 1, scene)


def test_member_without_the_state_of_an_update_says_so_at_once(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        members = Others(None)
        loop = TrainingLoop(
            OWN, open_resources(tmp_path), cast(RemoteMembers, members),
            VirtualClock(), ignore,
        )  # fmt: skip
        sums = ("0" * 64,) * 2
        commit = Commit(update=1, sums=sums, squared_norm=0.0, founder="a", compute_class="c1" * 32)
        roster = Member(OWN, 1), Member(MATE, 1)
        newest = Decision(1, bytes(32), roster, commit.encode())
        loop.decisions = RunDecisions(OWN, newest, members, VirtualClock(), 2)
        loop.stage = stage

        with pytest.raises(RefusedError, match="has not the state of the newest update itself"):
            await loop.answer(StateFetch(make_question_id(), 1, StatePart.DIGEST), b"", MATE)

    with_stage(tmp_path, 1, scene)
