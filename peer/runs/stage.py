"""A stage of a run as one member holds it: what it does with parts, sums and state.

A part enters a stage as activations and leaves it as gradients: the member computes forward, hands
its outputs to a member of the next stage, waits for their gradients, and computes backward. Where
the next member fails, its mates get the outputs. They are kept until the update is committed, as a
part that is lost at the next stage is computed again there alone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    ShoalError,
    UnavailableError,
)
from ...protocol.ids import MemberId
from ...protocol.messages.runs import (
    HeldOutPass,
    HeldOutPassed,
    PartPass,
    PartPassed,
    Reduced,
    Reduction,
    StateFetch,
    StateFollows,
    StatePart,
    SumFetch,
    Sums,
)
from ...protocol.net.tasks import cancel_all
from ...protocol.runs.commits import Commit
from ...protocol.runs.training_run import PartId
from ...protocol.runs.update_parts import unpack_parts
from ..engine.training.part_passes import PartPasses
from ..engine.training.span_state import StateDigest, StateLayout
from ..engine.training.trainable_span import NotFiniteError, TrainableSpan
from .questions import FAILURES, MemberAnswer, Members, make_busy, make_question_id
from .reduction import Residuals, SumAttempt, SummingMember, UpdateSums
from .run_resources import RunResources
from .state_transfer import FetchedState, StateCopies, fetch_state

_logger = logging.getLogger(__name__)

_WAIT_SECONDS = 30.0
"""How long a question waits for the update that it belongs to: others commit earlier."""


@dataclass
class _Counted:
    """A part that is counted; kept until the update is committed."""

    outputs: bytes
    """The activations that the next stage got; none at the last one."""
    input_grads: bytes
    """Encoded gradients for the previous stage; empty at the first stage."""
    loss: float
    route: tuple[MemberId, ...]
    digest: bytes
    """Of all that we have computed of it."""


class Stage:
    """The weights of a stage, and the update that is under way there.

    Used from the event loop; passes, sums and state are computed by `compute` of the resources.
    """

    def __init__(
        self,
        resources: RunResources,
        index: int,
        span: TrainableSpan,
        member_id: MemberId,
        members: Members,
        list_members: Callable[[int], Sequence[MemberId]],
    ) -> None:
        """`list_members` returns the present members of a stage."""
        self.index = index
        self.span = span
        self.parts = PartPasses(resources.run, resources.shards, span, index)
        self.update = span.update
        """The update that is under way here. That of the span is ahead for a moment: it changes on
        the thread that computes."""
        self.num_restarts = 0
        """How often that was begun again."""
        self.digest = StateDigest(b"", b"")
        """Of the state before the update."""
        self._run = resources.run
        self._compute = resources.compute
        self._member_id = member_id
        self._members = members
        self._list_members = list_members
        self._rng = random.Random(member_id)
        self._counted: dict[int, _Counted] = {}
        self.audited: dict[int, bytes] = {}
        """The digests of parts that we have computed for audits, as `_Counted.digest`."""
        self.refused: set[int] = set()
        """Parts of the update of which we compute numbers that are not finite."""
        self.accused: set[MemberId] = set()
        """Members that have sent us gradients of parts which no honest member sends."""
        self.fetched_bytes = self.state_bytes = 0
        """The size of the state that we download or load, of which we have so much; 0: none."""
        self._under_way: dict[int, asyncio.Task[_Counted]] = {}
        self._is_loading = False
        """Whether a state is being loaded. A part that was computed behind it would be in the sums,
        but not be counted, as `_begin_update` forgets it."""
        self._residuals: Residuals = {}
        own = SummingMember(member_id, members, span, resources.run.mode, resources.compute)
        self._begin_sums = partial(UpdateSums, own)
        self.sums = self._begin_sums(self._residuals)
        self._copies = StateCopies(span, resources.compute)
        self._advanced = asyncio.Condition()

    @classmethod
    async def build(
        cls,
        resources: RunResources,
        index: int,
        member_id: MemberId,
        members: Members,
        list_members: Callable[[int], Sequence[MemberId]],
    ) -> Stage:
        """Return a stage as it is before the first update."""
        config = resources.config
        make = partial(
            TrainableSpan, resources.run, resources.spans[index],
            num_threads=config.num_threads, graph_bytes=config.graph_bytes,
            read_free_bytes=config.read_free_bytes,
        )  # fmt: skip
        span = await resources.compute(make)
        stage = cls(resources, index, span, member_id, members, list_members)
        stage.digest = await resources.compute(partial(_digest_state, span))
        return stage

    def __repr__(self) -> str:
        return f"<Stage {self.index}, update {self.update}, {len(self._counted)} parts counted>"

    @property
    def counted(self) -> dict[int, bytes]:
        """The parts that are counted here, and the digests of what is computed of each."""
        return {index: one.digest for index, one in self._counted.items()}

    @property
    def part_seconds(self) -> float:
        """How long we compute for a part; 0: that is not known yet."""
        return sum(map(self._compute.find_usual_seconds, self.parts.counting))

    @property
    def part_wait_seconds(self) -> float:
        """How long a part waits for its turns to be computed here."""
        return sum(map(self._compute.find_usual_wait_seconds, self.parts.counting))

    def can_apply(self, commit: Commit) -> bool:
        """Return whether we have the sums of the update that was committed last."""
        return self._find_sums(commit) is not None

    def _find_sums(self, commit: Commit) -> SumAttempt | None:
        if self.update + 1 != commit.update:
            return None
        return self.sums.reduced.get(bytes.fromhex(commit.sums[self.index]))

    async def apply(self, commit: Commit) -> bool:
        """Apply the update that was committed last, if we have its sums; return whether."""
        reduced = self._find_sums(commit)
        if reduced is None:
            return False
        apply = partial(_apply, self.span, reduced, commit.squared_norm)
        digest, self._residuals = await self._compute(apply)
        await self._begin_update(digest)
        return True

    async def fetch_state(self, update: int) -> FetchedState:
        """Return the state before an update, from a mate. Raises UnavailableError if none has it.

        May be cancelled, as nothing has changed yet.
        """
        mates = [mate for mate in self._list_members(self.index) if mate != self._member_id]
        layout = StateLayout(self.span.read_state())
        self.fetched_bytes, self.state_bytes = 0, layout.num_bytes
        try:
            return await fetch_state(
                self._members, mates, update, StatePart.ALL, layout, self._compute,
                _logger.warning, self._note_fetched, self._rng,
            )  # fmt: skip
        except BaseException:
            self.fetched_bytes = self.state_bytes = 0
            raise

    def _note_fetched(self, num_bytes: int) -> None:
        self.fetched_bytes = num_bytes

    async def load(self, fetched: FetchedState) -> None:
        """Take a state. Raises UnavailableError for that of another update."""
        self._is_loading = True
        try:
            await self._compute(partial(_load_state, self.span, fetched.tensors, fetched.update))
        except RefusedError as error:
            self._is_loading = False
            async with self._advanced:
                self._advanced.notify_all()  # parts that wait go on: nothing has changed
            raise UnavailableError(
                f"the mates of stage {self.index} have no state: {error}"
            ) from None
        finally:
            self._is_loading = False
            self.fetched_bytes = self.state_bytes = 0
        self._residuals = {}
        await self._begin_update(fetched.digest)

    async def begin_again(self, num_restarts: int) -> None:
        """Forget all parts of the update under way, which was begun so often again."""
        self._is_loading = True
        try:
            await self._compute(self.span.forget_parts)
        finally:
            self._is_loading = False
        await self._begin_update(self.digest, num_restarts)

    async def close(self) -> None:
        """End what is under way."""
        await cancel_all(list(self._under_way.values()))

    async def _begin_update(self, digest: StateDigest, num_restarts: int = 0) -> None:
        self.update, self.num_restarts, self.digest = self.span.update, num_restarts, digest
        self._counted.clear()
        self.audited.clear()
        self.refused.clear()
        self.accused.clear()
        sums, self.sums = self.sums, self._begin_sums(self._residuals)
        for running in self._under_way.values():
            running.cancel()  # of the update before
        self._under_way.clear()
        await sums.end()
        async with self._advanced:
            self._advanced.notify_all()

    async def _wait_for_update(self, update: int, num_restarts: int = 0) -> None:
        """Wait until an update is under way, was begun again so often, and its state is there.

        Raises RefusedError for one that is over.
        """
        wanted = update, num_restarts
        try:
            async with asyncio.timeout(_WAIT_SECONDS), self._advanced:
                await self._advanced.wait_for(
                    lambda: (self.update, self.num_restarts) >= wanted and not self._is_loading
                )
        except TimeoutError:
            raise make_busy(f"this member has not come to update {update} yet") from None
        if self.update != update:
            raise RefusedError(
                ErrorCode.BAD_VALUES, f"update {update} is over, {self.update} is under way"
            )

    def _is_under_way(self, question: PartPass) -> bool:
        asked = question.update, question.num_restarts
        return asked == (self.update, self.num_restarts)

    async def _wait_for_part(self, question: PartPass) -> None:
        """Wait until a part may be computed. Raises RefusedError for one that is over."""
        await self._wait_for_update(question.update, question.num_restarts)
        if not self._is_under_way(question):
            detail = f"update {self.update} was begun again since part {question.index} was ordered"
            raise RefusedError(ErrorCode.BAD_VALUES, detail)

    # Parts

    async def pass_part(self, question: PartPass, payload: bytes | memoryview) -> MemberAnswer:
        """Have a part counted here and at later stages. Raises RefusedError, UnavailableError."""
        index = question.index
        if index >= self._run.parts_per_update:
            raise RefusedError(ErrorCode.BAD_VALUES, f"an update has no part {index}")
        await self._wait_for_part(question)
        if question.is_audit:
            return await self._audit(question, payload)
        while (running := self._under_way.get(index)) is not None:
            await asyncio.wait((running,))  # the same part again
            await self._wait_for_part(question)
        counted = self._counted.get(index)
        if counted is None or question.without == self._member_id:
            # It goes on although nobody waits for it any more: what is computed is counted.
            running = asyncio.create_task(self._work(question, payload))
            self._under_way[index] = running
            running.add_done_callback(partial(self._end_work, index))
            passed = await _wait_for(running)
        else:
            passed = counted
            if self.index < question.last_stage:
                _, _, route = await self._ask_next(question, passed.outputs)
                passed.route = (self._member_id, *route)
        grads = passed.input_grads if question.wants_gradients else b""
        message = PartPassed(question.question, len(grads), passed.loss, passed.route)
        return MemberAnswer(message, grads)

    def _end_work(self, index: int, running: asyncio.Task[_Counted]) -> None:
        if self._under_way.get(index) is running:
            del self._under_way[index]
        if not running.cancelled():
            running.exception()  # the caller that waits for it gets it, too

    async def _work(self, question: PartPass, payload: bytes | memoryview) -> _Counted:
        try:
            await self._wait_for_part(question)  # loading may just have begun
            return await self._work_on(question, payload)
        except NotFiniteError:
            if self._is_under_way(question):
                self.refused.add(question.index)
            raise

    async def _work_on(self, question: PartPass, payload: bytes | memoryview) -> _Counted:
        """Count a part, or take it out, as a mate has counted it, too."""
        part, compute = PartId(question.update, question.index), self._compute
        _check_size(payload, self.parts.input_bytes)
        is_last = self.span.modules.is_last
        if question.without == self._member_id:
            counted = self._counted.get(part.index)
            if counted is None:
                raise RefusedError(ErrorCode.BAD_VALUES, f"{part} is not counted here")
            grads = b""
            if not is_last:
                grads, _, _ = await self._ask_next(question, counted.outputs)
            await compute(partial(self.parts.discount, part, payload, grads))
            self._counted.pop(part.index, None)
            return counted
        if is_last:
            input_grads, digest, loss = await compute(partial(self.parts.run_loss, part, payload))
            counted = _Counted(b"", input_grads, loss, (self._member_id,), digest)
        else:
            outputs = await compute(partial(self.parts.run_forward, part, payload))
            grads, loss, route = await self._ask_next(question, outputs)
            input_grads, digest = await compute(
                partial(self.parts.run_backward, part, grads, outputs)
            )
            counted = _Counted(outputs, input_grads, loss, (self._member_id, *route), digest)
        if self._is_under_way(question):  # else it was committed meanwhile, by others
            self._counted[part.index] = counted
        return counted

    async def _audit(self, question: PartPass, payload: bytes | memoryview) -> MemberAnswer:
        """Do our stage's share of an audit. Raises what asking does, and RefusedError.

        The audited stage computes the part again. The one before it sends the activations that it
        keeps of the part, the one behind it the gradients.
        """
        part, counted = PartId(question.update, question.index), self._counted.get(question.index)
        passed = PartPassed(question.question, 0, 0.0, (self._member_id,))
        if self.index == question.last_stage:
            _check_size(payload, self.parts.input_bytes)
            grads = b""
            if not self.span.modules.is_last:
                grads = await self._hand_on_audit(question, b"", self.parts.output_bytes)
            digest = await self._compute(partial(self.parts.run_audit, part, payload, grads))
            if self._is_under_way(question):
                self.audited[part.index] = digest
            return MemberAnswer(passed)
        if counted is None:
            raise RefusedError(ErrorCode.BAD_VALUES, f"{part} is not counted here")
        if self.index > question.last_stage:
            grads = counted.input_grads
            return MemberAnswer(replace(passed, num_bytes=len(grads)), grads)
        await self._hand_on_audit(question, counted.outputs, 0)
        return MemberAnswer(passed)

    async def _hand_on_audit(
        self, question: PartPass, outputs: bytes, num_bytes: int
    ) -> bytes | memoryview:
        """Ask the next member of an audit; return so many bytes that it answers with."""
        if not question.route:
            raise RefusedError(ErrorCode.BAD_VALUES, "an audit ends before its last member")
        mate, *route = question.route
        asked = replace(
            question, question=make_question_id(), num_bytes=len(outputs), route=tuple(route)
        )
        answer = await self._members.ask(mate, asked, outputs, most_bytes=num_bytes)
        answer.check_kind(PartPassed)
        if len(answer.payload) != num_bytes:
            raise RemoteProtocolError(f"{mate} sent {len(answer.payload)} bytes for an audit")
        return answer.payload

    async def _ask_next(
        self, question: PartPass, outputs: bytes
    ) -> tuple[bytes | memoryview, float, tuple[MemberId, ...]]:
        """Hand outputs to the next stage; return their gradients, the loss, and the route taken.

        Where a member fails, its mates are asked. A failure further down ends the part, as the
        member before it has asked all mates there.
        """
        mates = list(self._list_members(self.index + 1))
        first, route = question.route[:1], question.route[1:]
        candidates = dict.fromkeys((*first, *self._rng.sample(mates, len(mates))))
        if question.without is not None:
            candidates = dict.fromkeys(first)  # nobody else has counted it
        error: ShoalError = UnavailableError(f"stage {self.index + 1} has no member")
        for mate in candidates:
            asked = replace(
                question, question=make_question_id(), num_bytes=len(outputs), route=route,
                wants_gradients=True,
            )  # fmt: skip
            try:
                answer = await self._members.ask(mate, asked, outputs, most_bytes=len(outputs))
                passed = answer.check_kind(PartPassed)
            except FAILURES as failure:
                error = failure
                if isinstance(error, RefusedError) and error.code is ErrorCode.NEXT_UNREACHABLE:
                    break
                continue
            grads = answer.payload
            if len(grads) == len(outputs) and await self._compute(
                partial(self.parts.is_finite, grads)
            ):
                return grads, passed.loss, passed.route
            self.accused.add(mate)
            error = RemoteProtocolError(f"{mate} sent other gradients, or not finite ones")
        raise UnavailableError(f"part {question.index} ended behind stage {self.index}: {error}")

    # Held-out parts

    async def evaluate(self, question: HeldOutPass, payload: bytes | memoryview) -> MemberAnswer:
        """Measure the loss of a held-out part with later stages. Raises RefusedError,
        RemoteProtocolError or UnavailableError.
        """
        index, route = question.index, question.route
        if index >= self._run.num_held_out_parts:
            raise RefusedError(ErrorCode.BAD_VALUES, f"the run has no held-out part {index}")
        _check_size(payload, self.parts.held_out_bytes)
        await self._wait_for_update(question.update)
        result = await self._compute(partial(self.parts.evaluate, question.update, index, payload))
        if isinstance(result, bytes):
            if not route:
                raise RefusedError(ErrorCode.BAD_VALUES, f"no member of stage {self.index + 1}")
            asked = replace(
                question, question=make_question_id(), num_bytes=len(result), route=route[1:]
            )
            answer = await self._members.ask(route[0], asked, result)
            result = answer.check_kind(HeldOutPassed).loss
        return MemberAnswer(HeldOutPassed(question.question, result))

    # Sums and state

    async def reduce(self, question: Reduction) -> MemberAnswer:
        """Sum our gradients with those of our mates.

        Raises RefusedError where we do not begin, or have no memory; RemoteProtocolError or
        UnavailableError where we fail at a mate, which others learn when they ask us.
        """
        await self._wait_for_update(question.update)
        sums, parts = self.sums, unpack_parts(question.parts)
        try:
            attempt = await sums.begin(question)
            # A part that is counted from now on is not in these sums.
            losses = [one.loss for index, one in self._counted.items() if index in parts]
            await sums.run(attempt)
        except (RuntimeError, MemoryError) as error:  # torch has no other error for memory
            _logger.warning("this member cannot sum its gradients", exc_info=True)
            reason = str(error) or "there is too little memory"  # a MemoryError says nothing
            detail = f"this member cannot sum: {reason}"
            raise RefusedError(ErrorCode.OUT_OF_MEMORY, detail) from None
        loss = sum(losses) if self.span.modules.is_last else 0.0
        return MemberAnswer(Reduced(question.question, attempt.digest, attempt.squared_norm, loss))

    async def read_sums(self, question: SumFetch) -> MemberAnswer:
        """Return numbers of our sums to a mate. Raises RefusedError where there are none."""
        numbers = await self.sums.read(question)
        return MemberAnswer(Sums(question.question, len(numbers)), numbers)

    async def read_state(self, question: StateFetch) -> MemberAnswer:
        """Return the state before an update. Raises RefusedError for one that is over."""
        await self._wait_for_update(question.update)
        digest = self.digest
        if question.part is StatePart.DIGEST:
            return MemberAnswer(StateFollows(question.question, 0, digest.whole, digest.rest))
        copy = await self._copies.read(question.part, question.update)
        follows = StateFollows(question.question, len(copy), digest.whole, digest.rest)
        return MemberAnswer(follows, copy)


def _check_size(payload: bytes | memoryview, num_bytes: int) -> None:
    if len(payload) != num_bytes:
        detail = f"{len(payload)} bytes are no activations of this stage"
        raise RefusedError(ErrorCode.BAD_VALUES, detail)


async def _wait_for(running: asyncio.Task[_Counted]) -> _Counted:
    """Wait for a part, which goes on when we are cancelled. Raises RefusedError if it was."""
    await asyncio.wait((running,))
    if running.cancelled():
        raise make_busy("this member goes on with another update, or leaves its stage")
    return running.result()


def _apply(
    span: TrainableSpan, reduced: SumAttempt, squared_norm: float
) -> tuple[StateDigest, Residuals]:
    """Update the weights; return the digest of the state behind it, and what rounding left out."""
    residuals = reduced.apply(squared_norm)
    return _digest_state(span), residuals


def _digest_state(span: TrainableSpan) -> StateDigest:
    return StateDigest.of(span.read_state())


def _load_state(span: TrainableSpan, state: Mapping[str, Tensor], update: int) -> None:
    """Load the state before an update. Raises RefusedError for another one."""
    if int(state["update"]) != update:
        raise RefusedError(ErrorCode.BAD_VALUES, f"that is not the state before update {update}")
    span.load_state(state)
