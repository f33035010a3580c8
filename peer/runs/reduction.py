"""Sums the gradients of an update over the members of a stage: a butterfly.

Each member sums one slice of the numbers, which it fetches from all mates, and fetches the other
slices, summed, from those that did (reduce-scatter, then all-gather: Rabenseifner, 2004). In exact
mode additions are exact (`kernels/exact_sums.py`), so all have the same bits, whoever summed what.
In int8 mode all take the bytes of the member that summed a slice, and so does that itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from ...protocol.messages.runs import Reduction, SumFetch, SumGroup
from ...protocol.net.tasks import cancel_all
from ...protocol.runs.training_run import Mode
from ...protocol.runs.update_parts import unpack_parts
from ..engine.training.trainable_span import TrainableSpan
from .gradient_vectors import ExactVector, GradientVector, Int8Vector, find_slice
from .questions import FAILURES, Members, StillBusyError, make_busy, make_question_id
from .run_resources import Compute

_CROSSING_SECONDS = 1.0
"""How much later than a mate, which refuses the one before, we may get the order of an attempt."""

_AT_ONCE_BYTES = 2**24
"""How many bytes of mates are asked for at once: round trips count where slices are small."""

_NUM_FAILED_READS = 2
"""How many attempts in a row a mate's sums cannot be read before it is named: the second one dials
it anew.
"""
_NUM_KEPT_SUMS = 2
"""How many of the newest sums are kept until the commit: each takes the memory of a gradient."""

Residuals = Mapping[SumGroup, Tensor]
"""What rounding left out of the last update's gradients, in int8 mode."""


@dataclass(frozen=True)
class SummingMember:
    """A member of a stage, with what it needs to sum gradients with its mates."""

    id: MemberId
    members: Members
    span: TrainableSpan
    mode: Mode
    compute: Compute


class UpdateSums:
    """The sums of one update as a member of a stage has them: all attempts, and their results."""

    def __init__(self, own: SummingMember, residuals: Residuals) -> None:
        """`residuals` are what rounding left out of the update before."""
        self.accused: set[MemberId] = set()
        """Mates that have sent numbers which are no sum of gradients."""
        self.reduced: dict[bytes, SumAttempt] = {}
        """The newest attempts that came to their end, by the digests of their sums. In int8 mode,
        sums of other groups of mates differ, and any of them may be the one that is committed."""
        self._own = own
        self._update = own.span.update
        self._residuals = residuals
        self._newest: SumAttempt | None = None
        """The attempt that mates may read."""
        self._begun = set[bytes]()
        """All attempts; another leader's replaces the one before."""
        self._failed_reads = Counter[MemberId]()
        """Of the sums of mates, since the last one that did not fail."""
        self._is_over = False
        self._changed = asyncio.Condition()

    @property
    def unreachable(self) -> list[MemberId]:
        """Mates whose sums we could not read in several attempts in a row."""
        return sorted(m for m, num in self._failed_reads.items() if num >= _NUM_FAILED_READS)

    def forget_others(self, members: Collection[MemberId]) -> None:
        """Forget how reading from all but these members failed: one that comes back is tried."""
        for gone in self._failed_reads.keys() - members:
            del self._failed_reads[gone]

    async def begin(self, order: Reduction) -> SumAttempt:
        """Begin an attempt, which mates may read from then on. Raises RefusedError."""
        attempt = SumAttempt(order, self._own)
        await self._own.compute(partial(attempt.collect, self._residuals))
        async with self._changed:
            self._check_under_way()
            if self._newest is not None:
                self._newest.abandon()
            self._newest = attempt
            self._begun.add(attempt.id)
            self._changed.notify_all()
        return attempt

    async def run(self, attempt: SumAttempt) -> None:
        """Sum with all mates. Raises what asking them does; UnavailableError if one refuses."""
        try:
            await attempt.run()
        except RefusedError as error:
            raise UnavailableError(f"a mate refuses: {error}") from None
        finally:
            attempt.abandon()  # unless it is done, mates do not wait for us
            self.accused |= attempt.accused
            for mate, was_read in attempt.read_from.items():
                self._failed_reads[mate] = 0 if was_read else self._failed_reads[mate] + 1
        await self._own.compute(attempt.summarize)
        self.reduced.pop(attempt.digest, None)
        self.reduced[attempt.digest] = attempt
        for digest in list(self.reduced)[:-_NUM_KEPT_SUMS]:
            del self.reduced[digest]

    async def read(self, question: SumFetch) -> bytes | memoryview:
        """Return numbers for a mate, once its attempt has begun here. Raises RefusedError."""
        async with self._changed:  # the leader ends an attempt that a member has not begun
            await self._changed.wait_for(lambda: self._is_over or question.attempt in self._begun)
        self._check_under_way()
        if self._newest is None or self._newest.id != question.attempt:
            raise make_busy("another attempt has begun")
        return await self._newest.read(question)

    async def end(self) -> None:
        """Let nobody wait for sums of this update any more."""
        self._is_over = True
        if self._newest is not None:
            self._newest.abandon()
        async with self._changed:
            self._changed.notify_all()

    def _check_under_way(self) -> None:
        if self._is_over:
            raise RefusedError(ErrorCode.BAD_VALUES, f"update {self._update} is over")


class SumAttempt:
    """One attempt to sum the gradients of an update, from a copy of the sums of a span."""

    def __init__(self, order: Reduction, own: SummingMember) -> None:
        self.id = order.attempt
        self.digest = b""
        """Of all sums of the stage; known after `summarize`, as is `squared_norm`."""
        self.squared_norm = 0.0
        self.accused: set[MemberId] = set()
        """Mates that have sent numbers which are no sum of gradients."""
        self.read_from: dict[MemberId, bool] = {}
        """Whether a mate's own sums could be read; nothing of a mate that was still busy."""
        self._order = order
        self._own = own
        self._vectors: dict[SumGroup, GradientVector] = {}
        self._mates: dict[SumGroup, Sequence[MemberId]] = {}
        loop = asyncio.get_running_loop()
        self._summed: dict[SumGroup, asyncio.Future[bool]] = {
            group: loop.create_future() for group in SumGroup
        }
        """Whether our own slice of a total is there; False: it will not be."""

    def collect(self, residuals: Residuals) -> None:
        """Copy the sums of our span. Raises RefusedError unless they are of the ordered parts."""
        span = self._own.span
        if {part.index for part in span.counted} != unpack_parts(self._order.parts):
            raise RefusedError(ErrorCode.BAD_VALUES, "other parts are counted here")
        tied = span.tied_names if self._order.tied else ()
        groups = {
            SumGroup.STAGE: (self._order.mates, [name for name in span.sums if name not in tied]),
            SumGroup.TIED: (self._order.tied, tied),
        }
        for group, (members, names) in groups.items():
            if not names:
                continue
            if self._own.id not in members:
                raise RefusedError(ErrorCode.BAD_VALUES, "the mates do not include this member")
            if self._own.mode == "exact":
                vector = ExactVector(span.sums, names, span.most_sum_norm)
            else:
                size = sum(span.sums[name].units.numel() for name in names)
                mates = [mate for mate in members if mate != self._own.id]
                slices = [find_slice(members, mate, size) for mate in mates]
                residual = residuals.get(group)
                vector = Int8Vector(span.sums, names, residual, slices, span.most_sum_norm)
            self._vectors[group], self._mates[group] = vector, members

    async def run(self) -> None:
        """Sum with all mates. Raises what asking them does, once all are asked for their sums."""
        summing = [asyncio.create_task(self._sum(group)) for group in self._vectors]
        try:
            for each in summing:
                await each
        finally:
            await cancel_all(summing)

    async def _sum(self, group: SumGroup) -> None:
        vector, members = self._vectors[group], self._mates[group]
        size = vector.numbers.numel()
        slices = {member: find_slice(members, member, size) for member in members}
        own = slices.pop(self._own.id)
        failures = await self._fetch_all(group, False, dict.fromkeys(slices, own))
        if self._summed[group].done():
            _raise_first(failures)  # we are given up here, too
        for mate in slices:
            # It waits for none of its mates when it is asked for these, only for its turn to
            # compute: it, or the link, is at fault.
            if mate not in failures:
                self.read_from.setdefault(mate, True)
            elif mate not in self.accused and not isinstance(failures[mate], StillBusyError):
                self.read_from[mate] = False
        _raise_first(failures)
        await self._own.compute(partial(vector.finish, *own))
        if self._summed[group].done():
            raise RefusedError(ErrorCode.BUSY, "another attempt has begun", 1.0)
        self._summed[group].set_result(True)
        _raise_first(await self._fetch_all(group, True, slices))

    async def _fetch_all(
        self, group: SumGroup, is_reduced: bool, slices: Mapping[MemberId, tuple[int, int]]
    ) -> dict[MemberId, ShoalError]:
        """Add numbers of mates to ours, or take their reduced ones; return who failed at that.

        At most `_AT_ONCE_BYTES` are asked for at once. Numbers are added in the order of the mates,
        which decides in int8 mode how a sum is rounded.
        """
        vector, failures = self._vectors[group], dict[MemberId, ShoalError]()
        mates = [mate for mate, (start, stop) in slices.items() if start < stop]
        most_numbers = max((stop - start for start, stop in slices.values()), default=0)
        num = max(1, _AT_ONCE_BYTES // max(1, vector.count_bytes(most_numbers, is_reduced)))
        for first in range(0, len(mates), num):
            some = mates[first : first + num]
            asking = [
                asyncio.create_task(self._ask(mate, group, is_reduced, *slices[mate]))
                for mate in some
            ]
            try:
                for mate, each in zip(some, asking, strict=True):
                    try:
                        await self._take(mate, group, is_reduced, *slices[mate], await each)
                    except FAILURES as error:
                        failures[mate] = error
            finally:
                await cancel_all(asking)
        return failures

    async def _ask(
        self, mate: MemberId, group: SumGroup, is_reduced: bool, start: int, stop: int
    ) -> bytes | memoryview:
        question = SumFetch(make_question_id(), self.id, group, is_reduced, start, stop)
        num_bytes = self._vectors[group].count_bytes(stop - start, is_reduced)
        try:
            answer = await self._own.members.ask(mate, question, most_bytes=num_bytes)
        except RefusedError:
            if not is_reduced:
                await asyncio.sleep(_CROSSING_SECONDS)
            raise
        return answer.payload

    async def _take(
        self,
        mate: MemberId,
        group: SumGroup,
        is_reduced: bool,
        start: int,
        stop: int,
        data: bytes | memoryview,
    ) -> None:
        """Add a mate's numbers to ours, or take its reduced ones."""
        vector = self._vectors[group]
        num_bytes = vector.count_bytes(stop - start, is_reduced)
        take = vector.load if is_reduced else vector.add
        try:
            if len(data) != num_bytes:
                raise ValueError(f"{len(data)} bytes are not {stop - start} numbers")
            await self._own.compute(partial(take, start, stop, data))
        except ValueError as error:
            self.accused.add(mate)
            raise RemoteProtocolError(f"{mate} sent no sum of gradients: {error}") from None

    async def read(self, question: SumFetch) -> bytes | memoryview:
        """Return numbers that a mate asks for. Raises RefusedError for what is not there."""
        vector = self._vectors.get(question.group)
        if vector is None:
            raise RefusedError(ErrorCode.BAD_VALUES, "there are no such numbers")
        if question.is_reduced and not await asyncio.shield(self._summed[question.group]):
            raise RefusedError(ErrorCode.BUSY, "the gradients are not summed here", 1.0)
        try:
            return vector.read(question.start, question.stop, question.is_reduced)
        except ValueError as error:
            raise RefusedError(ErrorCode.BAD_VALUES, str(error)) from None

    def abandon(self) -> None:
        """Let nobody wait for it any more."""
        for summed in self._summed.values():
            if not summed.done():
                summed.set_result(False)

    def apply(self, squared_norm: float) -> Residuals:
        """Update the weights of our span by the totals; return what the next update adds."""
        span, gradients = self._own.span, self._read_gradients()
        span.apply_update({name: gradients[name] for name in span.sums}, squared_norm)
        residuals = {group: vector.residual for group, vector in self._vectors.items()}
        return {group: one for group, one in residuals.items() if one is not None}

    def summarize(self) -> None:
        """Compute the digest of all sums, and the squared norm of the gradients."""
        digest = hashlib.sha256()
        for vector in self._vectors.values():
            digest.update(vector.numbers.numpy().data)
        self.digest = digest.digest()
        self.squared_norm = self._own.span.measure_squared_norm(self._read_gradients())

    def _read_gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for vector in self._vectors.values():
            gradients |= vector.read_gradients()
        return gradients


def _raise_first(failures: Mapping[MemberId, ShoalError]) -> None:
    for failure in failures.values():
        raise failure
