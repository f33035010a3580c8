"""An adapter that peers train: each of its blocks has one home, which keeps the optimizer's state.

A home that is lost takes nothing with it. The client has a state of each segment of blocks that was
fetched before, and every backward pass and update since: brought to another peer and asked for
again, in the same order, they lead to the same numbers.

Tensor suffixes: B rows, T tokens, H hidden.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ...protocol.messages.adapters import OptimizerSettings
from ...protocol.spans import Span
from ...protocol.versions import OPTIMIZER_VERSION
from ..adapters.adapter_versions import HousedVersion, find_homed
from ..adapters.learned_states import LearnedState
from ..concurrency.tasks import run_all
from ..passes.microbatches import TextGradients, Texts, halve
from ..passes.pass_asking import Passage, PassAsker, PassTrouble
from .home_calls import HomeCalls, LostHomeError
from .home_segments import Applied, LoggedPass, LoggedUpdate, Segment, list_stages

_SAVE_PERIOD = 10
"""Updates after which the state is fetched: so many a new home may have to make once more."""

_MOST_LOGGED_BYTES = 2**28
"""The inputs and gradients of one segment are kept until its state is fetched."""

_LEAST_NORM = 1e-6
"""As in torch's `clip_grad_norm_`."""


class AdapterHomes:
    """The homes of the blocks of one adapter. Owned by the client's loop, after `begin`.

    Asked like a `PassAsker` for passes whose rows have the adapter.
    """

    def __init__(self, asker: PassAsker) -> None:
        self.lineage = secrets.token_hex(8)
        self._asker = asker
        self._calls = HomeCalls(asker)
        self._segments: list[Segment] = []
        self._sums = itertools.count(1)
        self._applying: Applied | None = None
        self._num_updates = 0
        self._lock = asyncio.Lock()
        self._number = 0

    @property
    def has_begun(self) -> bool:
        """Whether peers have, or are to get, what is newest of the adapter."""
        return bool(self._segments)

    def begin(self, state: LearnedState) -> None:
        """Let peers go on from a state, as soon as something is asked of them."""
        log = [LoggedUpdate(next(self._sums))]
        self._segments = [Segment(state.span, state, log)]
        self._num_updates, self._applying = state.num_updates, None
        self._number += 1

    def forget(self) -> None:
        """Forget what peers have: something else is newer."""
        self._segments = []
        self._number += 1

    def take_version(self, is_trained: bool) -> HousedVersion:
        """Return the adapter as it is now, for rows of texts."""
        return HousedVersion(self.lineage, self._number, is_trained)

    async def ask_forward(self, span: Span, texts: Texts, weights: str | None = None) -> Passage:
        """Do what `PassAsker.ask_forward` does, at the home of the first block."""
        self._check_version(texts)
        trouble = self._asker.make_trouble(span)
        while True:
            segment = await self._find(span.start, trouble)
            if segment is None:
                stops = [one.span.start for one in self._segments if one.span.start > span.start]
                part = Span(span.start, min([span.stop, *stops]))
                plain = replace(texts.take_blocks(slice(0, len(part))), adapters=())
                return await self._asker.ask_forward(part, plain, weights)
            part = Span(span.start, min(span.stop, segment.span.stop))
            try:
                hidden_BTH = await self._calls.run_forward(
                    segment, part, texts.take_blocks(slice(0, len(part))), trouble
                )
            except LostHomeError:
                continue
            assert segment.weights is not None
            return Passage(part, segment.weights, hidden_BTH)

    async def ask_backward(
        self, span: Span, texts: Texts, grads_BTH: Tensor, weights: str
    ) -> TextGradients | None:
        """Do what `PassAsker.ask_backward` does; the gradients of the adapter stay at home."""
        self._check_version(texts)
        trouble = self._asker.make_trouble(span)
        while True:
            segment = await self._find(span.start, trouble)
            if segment is None:
                plain = replace(texts, adapters=())
                return await self._asker.ask_backward(span, plain, grads_BTH, weights)
            if not segment.span.covers(span):
                return None
            try:
                return await self._calls.run_backward(
                    segment,
                    span,
                    texts,
                    grads_BTH,
                    trouble,
                    lambda segment=segment: segment in self._segments,
                )
            except LostHomeError:
                continue

    async def measure(self) -> float:
        """Return the norm of all gradients that were gathered for the next update."""
        await self._for_all(
            self._calls.measure, lambda one: one.square_sum is None and bool(one.log[-1].passes)
        )
        return math.sqrt(sum(one.square_sum or 0.0 for one in self._segments))

    async def update(self, settings: OptimizerSettings, max_norm: float | None) -> None:
        """Make an update, if there are gradients; of all blocks or, before any is made, of none.

        One that was interrupted is brought to its end first.
        """
        if self._applying is None:
            if not any(one.log[-1].passes for one in self._segments):
                return
            norm = await self.measure()  # which no home refuses for what it has gathered
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + _LEAST_NORM))
            self._applying = Applied(settings, factor)
        wanted, applied = self._num_updates + 1, self._applying
        await self._for_all(
            lambda one, trouble: self._calls.apply(one, applied, trouble),
            lambda one: not one.is_empty and one.num_updates < wanted,
        )
        number = next(self._sums)
        for segment in self._segments:
            segment.drop_gradients(number)
            self._num_updates, self._applying = wanted, None
        self._number += 1
        num_updates = max(len(one.log) - 1 for one in self._segments)
        num_bytes = max(one.num_bytes for one in self._segments)
        if num_updates >= _SAVE_PERIOD or num_bytes > _MOST_LOGGED_BYTES:
            await self.fetch()

    async def drop_gradients(self) -> None:
        """Gather gradients from nothing again. Raises UsageError in the middle of an update."""
        if self._applying is not None:
            raise UsageError("step() did not come to its end; call it again to go on")
        number = next(self._sums)
        for segment in self._segments:
            segment.drop_gradients(number)

    async def fetch(self) -> LearnedState | None:
        """Return all that peers have learned, and keep it to go on from; None before `begin`."""
        if not self._segments:
            return None
        await self._for_all(self._calls.fetch, lambda one: len(one.log) > 1 and not one.is_empty)
        first = self._segments[0].saved
        matrices = {name: x for one in self._segments for name, x in one.saved.matrices.items()}
        moments = tuple(
            {
                name: x
                for one in self._segments
                if one.saved.moments
                for name, x in one.saved.moments[place].items()
            }
            for place in range(first.kind.num_moments if self._num_updates else 0)
        )
        return replace(first, matrices=matrices, moments=moments, num_updates=self._num_updates)

    def _check_version(self, texts: Texts) -> None:
        version = find_homed(texts.adapters)
        if version is None or version.number != self._number:
            raise UsageError(
                "the adapter was updated at its peers since this forward pass: call backward() "
                "before step()"
            )

    async def _find(self, block: int, trouble: PassTrouble) -> Segment | None:
        """Return the segment of a block, which has a home then; None for a block without."""
        async with self._lock:
            while True:
                found = [segment for segment in self._segments if block in segment.span]
                if not found or found[0].hop is not None:
                    return found[0] if found else None
                await self._house(found[0], trouble)

    async def _house(self, lost: Segment, trouble: PassTrouble) -> None:
        """Find a home for a segment, or several, and have them do what was done before."""
        fresh: list[Segment] = []
        start = lost.span.start
        try:
            while start < lost.span.stop:
                rest = Span(start, lost.span.stop)
                trouble.least_version = OPTIMIZER_VERSION
                segment = lost.cut(await self._asker.choose_home(rest, trouble, lost.weights))
                await self._calls.bring(segment, trouble)
                fresh.append(segment)
                start = segment.span.stop
            for update in lost.log:
                for segment in fresh:
                    segment.drop_gradients(update.number)
                for logged in update.passes:
                    await self._replay(fresh, logged, trouble)
                for segment in fresh if update.applied is not None else ():
                    if not segment.is_empty:
                        assert update.applied is not None
                        await self._calls.apply(segment, update.applied, trouble)
        except LostHomeError:
            return
        place = self._segments.index(lost)
        self._segments[place : place + 1] = fresh
        hops = [segment.home for segment in fresh]
        self._asker.failovers.note(trouble.take_lost(lost.span), hops)

    async def _replay(
        self, fresh: Sequence[Segment], logged: LoggedPass, trouble: PassTrouble
    ) -> None:
        """Have gradients gathered again, now perhaps by several homes in a row."""
        stages: list[tuple[Segment, Span, Texts]] = []
        rest = logged.texts
        touched = list_stages(fresh, logged.span)
        for segment, span in touched:
            texts = rest.take_blocks(slice(0, len(span)))
            stages.append((segment, span, texts))
            if segment is not touched[-1][0]:
                hidden_BTH = await self._halving(
                    partial(self._forward_rows, segment, span, trouble), texts, texts.hidden_BTH
                )
                rest = rest.take_blocks(slice(len(span), None)).move_to(hidden_BTH)
        grads_BTH = logged.grads_BTH
        for segment, span, texts in reversed(stages):
            run = partial(self._backward_rows, segment, span, trouble)
            grads_BTH = await self._halving(run, texts, grads_BTH)

    async def _forward_rows(
        self, segment: Segment, span: Span, trouble: PassTrouble, texts: Texts, _: Tensor
    ) -> Tensor:
        return await self._calls.run_forward(segment, span, texts, trouble)

    async def _backward_rows(
        self, segment: Segment, span: Span, trouble: PassTrouble, texts: Texts, grads_BTH: Tensor
    ) -> Tensor:
        found = await self._calls.run_backward(segment, span, texts, grads_BTH, trouble)
        return found.hidden_BTH

    async def _halving(
        self,
        run: Callable[[Texts, Tensor], Awaitable[Tensor]],
        texts: Texts,
        beside_BTH: Tensor,
    ) -> Tensor:
        """Run rows in halves where a new home has less memory than the one before."""
        try:
            return await run(texts, beside_BTH)
        except RefusedError as error:
            if error.code is not ErrorCode.OUT_OF_MEMORY or texts.num_rows == 1:
                raise
        parts = [
            await self._halving(run, texts.take_rows(rows), beside_BTH[rows])
            for rows in halve(slice(0, texts.num_rows))
        ]
        return torch.cat(parts)

    async def _for_all(
        self,
        work: Callable[[Segment, PassTrouble], Awaitable[None]],
        is_pending: Callable[[Segment], bool],
    ) -> None:
        """Do something at the home of each segment for which it is not done yet."""
        if not self._segments:
            return
        trouble = self._asker.make_trouble(self._segments[0].span)

        async def do(block: int) -> None:
            segment = await self._find(block, trouble)
            try:
                if segment is not None and is_pending(segment):
                    await work(segment, trouble)
            except LostHomeError:
                return  # and is found again by the loop

        while pending := [one for one in self._segments if one.hop is None or is_pending(one)]:
            await run_all(do(segment.span.start) for segment in pending)
