"""Sums the gradients of an update over the members of a stage: a butterfly of whole numbers.

Each member sums one slice of the numbers, which it fetches from all mates, and fetches the other
slices, summed, from those that did (reduce-scatter, then all-gather: Rabenseifner, 2004). Additions
are exact (`kernels/exact_sums.py`), so all have the same bits, whoever summed what.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.exact_sums import check_units
from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.ids import MemberId
from ...protocol.messages.runs import SUM_BYTES, Reduction, SumFetch, SumGroup
from ..engine.training.optimizers import measure_norms
from ..engine.training.trainable_span import TrainableSpan
from .questions import Members, make_question_id


@dataclass
class _Vector:
    """The numbers that one group of members sums, one tensor behind the other."""

    members: Sequence[MemberId]
    names: Sequence[str]
    own: Tensor
    total: Tensor
    room: int
    """The most addends of each sum."""

    def find_slice(self, member: MemberId) -> tuple[int, int]:
        """Return which numbers a member sums."""
        index, count = self.members.index(member), len(self.members)
        size = self.own.numel()
        return index * size // count, (index + 1) * size // count


class Reducing:
    """One attempt to sum the gradients of an update, from a copy of the sums of a span."""

    def __init__(self, order: Reduction, member_id: MemberId, members: Members) -> None:
        self.update = order.update
        self.attempt = order.attempt
        self.digest = b""
        """Of all sums of the stage; as `squared_norms`, known after `summarize`."""
        self.squared_norms: Sequence[float] = ()
        self._order = order
        self._member_id = member_id
        self._members = members
        self._vectors: dict[SumGroup, _Vector] = {}
        loop = asyncio.get_running_loop()
        self._summed: dict[SumGroup, asyncio.Future[bool]] = {
            group: loop.create_future() for group in SumGroup
        }
        """Whether our own slice of a total is there; False: it will not be."""

    def collect(self, span: TrainableSpan, parts: set[int]) -> None:
        """Copy the sums of a span. Raises RefusedError unless they are of these parts."""
        if {part.index for part in span.counted} != parts:
            raise RefusedError(ErrorCode.BAD_VALUES, "other parts are counted here")
        tied = span.tied_names if self._order.tied else ()
        own = [name for name in span.sums if name not in tied]
        self._collect(SumGroup.STAGE, span, self._order.mates, own)
        if tied:
            self._collect(SumGroup.TIED, span, self._order.tied, tied)

    def _collect(
        self,
        group: SumGroup,
        span: TrainableSpan,
        members: Sequence[MemberId],
        names: Sequence[str],
    ) -> None:
        if self._member_id not in members:
            raise RefusedError(ErrorCode.BAD_VALUES, "the mates do not include this member")
        own = torch.cat([span.sums[name].units.flatten() for name in names])
        room = span.sums[names[0]].room
        self._vectors[group] = _Vector(tuple(members), names, own, own.clone(), room)

    async def run(self) -> None:
        """Sum with all mates. Raises what asking them does."""
        for group, vector in self._vectors.items():
            await self._sum(group, vector)

    async def _sum(self, group: SumGroup, vector: _Vector) -> None:
        mates = [member for member in vector.members if member != self._member_id]
        start, stop = vector.find_slice(self._member_id)
        for mate in mates:
            vector.total[start:stop] += await self._fetch(mate, group, False, start, stop)
        if self._summed[group].done():
            raise RefusedError(ErrorCode.BUSY, "another attempt has begun", 1.0)
        self._summed[group].set_result(True)
        for mate in mates:
            start, stop = vector.find_slice(mate)
            vector.total[start:stop] = await self._fetch(mate, group, True, start, stop)

    async def _fetch(
        self, mate: MemberId, group: SumGroup, is_reduced: bool, start: int, stop: int
    ) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.float64)
        question = SumFetch(make_question_id(), self.attempt, group, is_reduced, start, stop)
        answer = await self._members.ask(mate, question, most_bytes=SUM_BYTES * (stop - start))
        if len(answer.payload) != SUM_BYTES * (stop - start):
            raise RemoteProtocolError(f"{len(answer.payload)} bytes are not {stop - start} numbers")
        numbers = torch.from_numpy(np.frombuffer(answer.payload, dtype="<f8").copy())
        room = self._vectors[group].room
        try:
            check_units(numbers, room, room)
        except ValueError as error:
            raise RemoteProtocolError(f"{mate} sent no sum of gradients: {error}") from None
        return numbers

    async def read(self, question: SumFetch) -> bytes:
        """Return numbers that a mate asks for. Raises RefusedError for what is not there."""
        vector = self._vectors.get(question.group)
        if vector is None or question.stop > vector.own.numel():
            raise RefusedError(ErrorCode.BAD_VALUES, "there are no such numbers")
        if question.is_reduced and not await asyncio.shield(self._summed[question.group]):
            raise RefusedError(ErrorCode.BUSY, "the gradients are not summed here", 1.0)
        numbers = vector.total if question.is_reduced else vector.own
        return numbers[question.start : question.stop].numpy().astype("<f8", copy=False).tobytes()

    def abandon(self) -> None:
        """Let nobody wait for it any more."""
        for summed in self._summed.values():
            if not summed.done():
                summed.set_result(False)

    def apply(self, span: TrainableSpan, squared_norm: float) -> None:
        """Update the weights of the span by the totals."""
        gradients: dict[str, Tensor] = {}
        for group in self._vectors:
            gradients |= self._read_gradients(span, group)
        span.apply_update({name: gradients[name] for name in span.sums}, [squared_norm])

    def _read_gradients(self, span: TrainableSpan, group: SumGroup) -> dict[str, Tensor]:
        vector = self._vectors[group]
        sums = [span.sums[name] for name in vector.names]
        pieces = vector.total.split([total.units.numel() for total in sums])
        return {
            name: total.convert(piece).view(total.units.shape)
            for name, total, piece in zip(vector.names, sums, pieces, strict=True)
        }

    def summarize(self, span: TrainableSpan) -> None:
        """Compute the digest of all sums, and the squared norms of the gradients."""
        digest = hashlib.sha256()
        norms: list[float] = []
        for group, vector in sorted(self._vectors.items()):
            digest.update(vector.total.numpy().data)
            if group is SumGroup.STAGE or span.modules.is_first:
                norms += measure_norms(self._read_gradients(span, group)).values()
        self.digest, self.squared_norms = digest.digest(), norms
