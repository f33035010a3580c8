"""Sums the gradients of an update over the members of a stage: a butterfly.

Each member sums one slice of the numbers, which it fetches from all mates, and fetches the other
slices, summed, from those that did (reduce-scatter, then all-gather: Rabenseifner, 2004). In exact
mode additions are exact (`kernels/exact_sums.py`), so all have the same bits, whoever summed what.
In int8 mode all take the bytes of the member that summed a slice, and so does that itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError, ShoalError
from ...protocol.ids import MemberId
from ...protocol.messages.runs import Reduction, SumFetch, SumGroup
from ...protocol.runs.training_run import Mode
from ..engine.training.trainable_span import TrainableSpan
from .gradient_vectors import ExactVector, GradientVector, Int8Vector, find_slice
from .questions import FAILURES, Members, StillBusyError, make_question_id
from .run_resources import Compute

_CROSSING_SECONDS = 1.0
"""How much later than a mate, which refuses the one before, we may get the order of an attempt."""

Residuals = Mapping[SumGroup, Tensor]
"""What rounding left out of the last update's gradients, in int8 mode."""


class Reducing:
    """One attempt to sum the gradients of an update, from a copy of the sums of a span."""

    def __init__(
        self, order: Reduction, member_id: MemberId, members: Members, compute: Compute
    ) -> None:
        self.update = order.update
        self.attempt = order.attempt
        self.digest = b""
        """Of all sums of the stage; known after `summarize`, as is `squared_norm`."""
        self.squared_norm = 0.0
        self.accused: set[MemberId] = set()
        """Mates that have sent numbers which are no sum of gradients."""
        self.read_from: dict[MemberId, bool] = {}
        """Whether a mate's own sums could be read; nothing of a mate that was still busy."""
        self._order = order
        self._member_id = member_id
        self._members = members
        self._compute = compute
        self._vectors: dict[SumGroup, GradientVector] = {}
        self._mates: dict[SumGroup, Sequence[MemberId]] = {}
        loop = asyncio.get_running_loop()
        self._summed: dict[SumGroup, asyncio.Future[bool]] = {
            group: loop.create_future() for group in SumGroup
        }
        """Whether our own slice of a total is there; False: it will not be."""

    def collect(
        self, mode: Mode, span: TrainableSpan, parts: set[int], residuals: Residuals
    ) -> None:
        """Copy the sums of a span. Raises RefusedError unless they are of these parts."""
        if {part.index for part in span.counted} != parts:
            raise RefusedError(ErrorCode.BAD_VALUES, "other parts are counted here")
        tied = span.tied_names if self._order.tied else ()
        groups = {
            SumGroup.STAGE: (self._order.mates, [name for name in span.sums if name not in tied]),
            SumGroup.TIED: (self._order.tied, tied),
        }
        for group, (members, names) in groups.items():
            if not names:
                continue
            if self._member_id not in members:
                raise RefusedError(ErrorCode.BAD_VALUES, "the mates do not include this member")
            if mode == "exact":
                vector = ExactVector(span.sums, names, span.most_sum_norm)
            else:
                size = sum(span.sums[name].units.numel() for name in names)
                mates = [mate for mate in members if mate != self._member_id]
                slices = [find_slice(members, mate, size) for mate in mates]
                residual = residuals.get(group)
                vector = Int8Vector(span.sums, names, residual, slices, span.most_sum_norm)
            self._vectors[group], self._mates[group] = vector, members

    async def run(self) -> None:
        """Sum with all mates. Raises what asking them does, once all are asked for their sums."""
        for group, vector in self._vectors.items():
            await self._sum(group, vector)

    async def _sum(self, group: SumGroup, vector: GradientVector) -> None:
        members, size = self._mates[group], vector.numbers.numel()
        mates = [member for member in members if member != self._member_id]
        start, stop = find_slice(members, self._member_id, size)
        failure: ShoalError | None = None
        for mate in mates:
            try:
                await self._fetch(mate, group, False, start, stop)
            except FAILURES as error:
                if isinstance(error, RefusedError):
                    await asyncio.sleep(_CROSSING_SECONDS)
                if self._summed[group].done():
                    raise  # we are given up here, too
                # It waits for none of its mates when it is asked for these, only for its turn to
                # compute: it, or the link, is at fault. The others are asked, too: one that fails
                # at all of them is at fault itself.
                failure = failure or error
                if mate not in self.accused and not isinstance(error, StillBusyError):
                    self.read_from[mate] = False
            else:
                self.read_from.setdefault(mate, True)
        if failure is not None:
            raise failure
        await self._compute(partial(vector.finish, start, stop))
        if self._summed[group].done():
            raise RefusedError(ErrorCode.BUSY, "another attempt has begun", 1.0)
        self._summed[group].set_result(True)
        for mate in mates:
            await self._fetch(mate, group, True, *find_slice(members, mate, size))

    async def _fetch(
        self, mate: MemberId, group: SumGroup, is_reduced: bool, start: int, stop: int
    ) -> None:
        """Add a mate's numbers to ours, or take its reduced ones."""
        if start == stop:
            return
        vector = self._vectors[group]
        question = SumFetch(make_question_id(), self.attempt, group, is_reduced, start, stop)
        num_bytes = vector.count_bytes(stop - start, is_reduced)
        answer = await self._members.ask(mate, question, most_bytes=num_bytes)
        take = vector.load if is_reduced else vector.add
        try:
            if len(answer.payload) != num_bytes:
                raise ValueError(f"{len(answer.payload)} bytes are not {stop - start} numbers")
            await self._compute(partial(take, start, stop, answer.payload))
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

    def apply(self, span: TrainableSpan, squared_norm: float) -> Residuals:
        """Update the weights of the span by the totals; return what the next update adds."""
        gradients = self._read_gradients()
        span.apply_update({name: gradients[name] for name in span.sums}, squared_norm)
        residuals = {group: vector.residual for group, vector in self._vectors.items()}
        return {group: one for group, one in residuals.items() if one is not None}

    def summarize(self, span: TrainableSpan) -> None:
        """Compute the digest of all sums, and the squared norm of the gradients."""
        digest = hashlib.sha256()
        for vector in self._vectors.values():
            digest.update(vector.numbers.numpy().data)
        self.digest = digest.digest()
        self.squared_norm = span.measure_squared_norm(self._read_gradients())

    def _read_gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for vector in self._vectors.values():
            gradients |= vector.read_gradients()
        return gradients
