"""The optimizer of an adapter that peers train; each peer holds a shard: the state for some blocks.

A peer that is lost takes nothing with it. The client keeps a state of each shard that was fetched
before, and every backward pass and update since: uploaded to another peer and asked for again, in
the same order, they lead to the same numbers.

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
from typing import TypeVar

import torch
from torch import Tensor

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
    UsageError,
)
from ...protocol.ids import SessionId, UploadId
from ...protocol.messages.adapters import (
    AdapterFetch,
    AdapterMeasure,
    AdapterUpdate,
    OptimizerSettings,
    make_updated_id,
)
from ...protocol.messages.passes import AccumulationOrder
from ...protocol.spans import Span
from ...protocol.versions import OPTIMIZER_VERSION
from ..adapters.adapter_versions import ShardedVersion, find_sharded
from ..adapters.learned_states import LearnedState
from ..concurrency.tasks import run_all
from ..passes.microbatches import TextGradients, Texts, halve, make_pass_id
from ..passes.pass_asking import PassAsker, PassFailures, SpanOutput
from ..passes.pass_links import PassLink
from .shard import AppliedUpdate, LoggedPass, LoggedUpdate, Shard, list_stages

_SAVE_PERIOD = 10
"""Updates after which the state is fetched: so many another peer may have to repeat."""

_MOST_LOGGED_BYTES = 2**28
"""The inputs and gradients of one shard are kept until its state is fetched."""

_PATIENCE_SECONDS = 60.0
"""Requests wait for passes of other clients; the peer reports that meanwhile."""

_PATIENCE = 2.0
"""An adapter may take so many times what its line is expected to take."""

_OF_THE_QUESTION = (
    ErrorCode.OUT_OF_MEMORY,
    ErrorCode.BAD_VALUES,
    ErrorCode.BAD_FRAME,
    ErrorCode.TOO_LONG,
)
"""Refusals that another peer would only repeat."""

Result = TypeVar("Result")

_LEAST_NORM = 1e-6
"""As in torch's `clip_grad_norm_`."""


class LostShardError(Exception):
    """The peer that held a shard is lost and was blamed."""


class ShardedOptimizer:
    """The shards of one adapter, and the peers that hold them. Owned by the client's loop.

    Asked like a `PassAsker` for passes whose rows have the adapter.
    """

    def __init__(self, asker: PassAsker) -> None:
        self.lineage = secrets.token_hex(8)
        self._asker = asker
        self._part_numbers = itertools.count(1)
        self._shards: list[Shard] = []
        self._sums = itertools.count(1)
        self._applying: AppliedUpdate | None = None
        self._num_updates = 0
        self._lock = asyncio.Lock()
        self._number = 0

    @property
    def has_begun(self) -> bool:
        """Whether peers have, or are to get, what is newest of the adapter."""
        return bool(self._shards)

    def begin(self, state: LearnedState) -> None:
        """Let peers go on from a state, as soon as something is asked of them."""
        log = [LoggedUpdate(next(self._sums))]
        self._shards = [Shard(state.span, state, log)]
        self._num_updates, self._applying = state.num_updates, None
        self._number += 1

    def forget(self) -> None:
        """Forget what peers have, and an update that was interrupted: something else is newer."""
        self._shards, self._applying = [], None
        self._number += 1

    def take_version(self, is_trained: bool) -> ShardedVersion:
        """Return the adapter as it is now, for rows of texts."""
        return ShardedVersion(self.lineage, self._number, is_trained)

    async def ask_forward(self, span: Span, texts: Texts, weights: str | None = None) -> SpanOutput:
        """Do what `PassAsker.ask_forward` does, at the peer that holds the first block."""
        self._check_version(texts)
        failures = self._asker.make_failures()
        while True:
            shard = await self._find(span.start, failures)
            if shard is None:
                stops = [one.span.start for one in self._shards if one.span.start > span.start]
                part = Span(span.start, min([span.stop, *stops]))
                plain = replace(texts.take_blocks(slice(0, len(part))), adapters=())
                return await self._asker.ask_forward(part, plain, weights)
            part = Span(span.start, min(span.stop, shard.span.stop))
            try:
                hidden_BTH = await self._run_forward(
                    shard, part, texts.take_blocks(slice(0, len(part))), failures
                )
            except LostShardError:
                continue
            assert shard.weights is not None
            return SpanOutput(part, shard.weights, hidden_BTH)

    async def ask_backward(
        self, span: Span, texts: Texts, grads_BTH: Tensor, weights: str
    ) -> TextGradients | None:
        """Do what `PassAsker.ask_backward` does; the gradients of the adapter stay at the peer."""
        self._check_version(texts)
        failures = self._asker.make_failures()
        while True:
            shard = await self._find(span.start, failures)
            if shard is None:
                plain = replace(texts, adapters=())
                return await self._asker.ask_backward(span, plain, grads_BTH, weights)
            if not shard.span.covers(span):
                return None
            try:
                return await self._run_backward(
                    shard,
                    span,
                    texts,
                    grads_BTH,
                    failures,
                    lambda shard=shard: shard in self._shards,
                )
            except LostShardError:
                continue

    async def fetch_norm(self) -> float:
        """Return the norm of all gradients that were accumulated for the next update."""
        await self._for_all(
            self._fetch_square_sum, lambda one: one.square_sum is None and bool(one.log[-1].passes)
        )
        return math.sqrt(sum(one.square_sum or 0.0 for one in self._shards))

    async def update(self, settings: OptimizerSettings, max_norm: float | None) -> None:
        """Make an update, if there are gradients; of all blocks or, before any is made, of none.

        One that was interrupted is brought to its end first.
        """
        if self._applying is None:
            if not any(one.log[-1].passes for one in self._shards):
                return
            norm = await self.fetch_norm()  # which no peer refuses for what it has accumulated
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + _LEAST_NORM))
            self._applying = AppliedUpdate(settings, factor)
        wanted, applied = self._num_updates + 1, self._applying
        await self._for_all(
            lambda one, failures: self._apply(one, applied, failures),
            lambda one: not one.is_empty and one.num_updates < wanted,
        )
        number = next(self._sums)
        for shard in self._shards:
            shard.drop_gradients(number)
        self._num_updates, self._applying = wanted, None
        self._number += 1
        num_updates = max(len(one.log) - 1 for one in self._shards)
        num_bytes = max(one.num_bytes for one in self._shards)
        if num_updates >= _SAVE_PERIOD or num_bytes > _MOST_LOGGED_BYTES:
            await self.fetch()

    async def drop_gradients(self) -> None:
        """Accumulate gradients from nothing again, also after an update that no peer has made.

        Raises UsageError in the middle of another one.
        """
        if all(one.num_updates <= self._num_updates for one in self._shards):
            self._applying = None
        self._check_whole()
        number = next(self._sums)
        for shard in self._shards:
            shard.drop_gradients(number)

    async def fetch(self) -> LearnedState | None:
        """Return all that peers have learned, and keep it to go on from; None before `begin`.

        Raises UsageError in the middle of an update: some blocks have it, and others do not.
        """
        self._check_whole()
        if not self._shards:
            return None
        await self._for_all(self._fetch_shard, lambda one: len(one.log) > 1 and not one.is_empty)
        first = self._shards[0].saved
        matrices = {name: x for one in self._shards for name, x in one.saved.matrices.items()}
        moments = tuple(
            {
                name: x
                for one in self._shards
                if one.saved.moments
                for name, x in one.saved.moments[place].items()
            }
            for place in range(first.kind.num_moments if self._num_updates else 0)
        )
        return replace(first, matrices=matrices, moments=moments, num_updates=self._num_updates)

    def _check_whole(self) -> None:
        if self._applying is not None:
            raise UsageError("step() did not come to its end; call it again to go on")

    def _check_version(self, texts: Texts) -> None:
        version = find_sharded(texts.adapters)
        if version is None or version.number != self._number:
            raise UsageError(
                "the adapter was updated at its peers since this forward pass: call backward() "
                "before step()"
            )

    async def _find(self, block: int, failures: PassFailures) -> Shard | None:
        """Return the shard of a block, which a peer holds then; None for a block without."""
        async with self._lock:
            while True:
                found = [shard for shard in self._shards if block in shard.span]
                if not found or found[0].hop is not None:
                    return found[0] if found else None
                await self._place(found[0], failures)

    async def _place(self, lost: Shard, failures: PassFailures) -> None:
        """Find a peer for a shard, or several, and have them repeat what was done before."""
        fresh: list[Shard] = []
        start = lost.span.start
        try:
            while start < lost.span.stop:
                rest = Span(start, lost.span.stop)
                failures.least_version = OPTIMIZER_VERSION
                shard = lost.cut(await self._asker.choose_shard_peer(rest, failures, lost.weights))
                await self._bring(shard, failures)
                fresh.append(shard)
                start = shard.span.stop
            for update in lost.log:
                for shard in fresh:
                    shard.drop_gradients(update.number)
                for logged in update.passes:
                    await self._replay(fresh, logged, failures)
                for shard in fresh if update.applied is not None else ():
                    if not shard.is_empty:
                        assert update.applied is not None
                        await self._apply(shard, update.applied, failures)
        except LostShardError:
            return
        place = self._shards.index(lost)
        self._shards[place : place + 1] = fresh
        hops = [shard.held_at for shard in fresh]
        self._asker.failovers.note(failures.take_lost(lost.span), hops)

    async def _replay(
        self, fresh: Sequence[Shard], logged: LoggedPass, failures: PassFailures
    ) -> None:
        """Have gradients accumulated again, now perhaps by several peers in a row."""
        inputs: list[tuple[Shard, Span, Texts]] = []
        rest = logged.texts
        touched = list_stages(fresh, logged.span)
        for shard, span in touched:
            texts = rest.take_blocks(slice(0, len(span)))
            inputs.append((shard, span, texts))
            if shard is not touched[-1][0]:
                hidden_BTH = await self._halving(
                    partial(self._forward_rows, shard, span, failures), texts, texts.hidden_BTH
                )
                rest = rest.take_blocks(slice(len(span), None)).move_to(hidden_BTH)
        grads_BTH = logged.grads_BTH
        for shard, span, texts in reversed(inputs):
            run = partial(self._backward_rows, shard, span, failures)
            grads_BTH = await self._halving(run, texts, grads_BTH)

    async def _forward_rows(
        self, shard: Shard, span: Span, failures: PassFailures, texts: Texts, _: Tensor
    ) -> Tensor:
        return await self._run_forward(shard, span, texts, failures)

    async def _backward_rows(
        self, shard: Shard, span: Span, failures: PassFailures, texts: Texts, grads_BTH: Tensor
    ) -> Tensor:
        found = await self._run_backward(shard, span, texts, grads_BTH, failures)
        return found.hidden_BTH

    async def _halving(
        self,
        run: Callable[[Texts, Tensor], Awaitable[Tensor]],
        texts: Texts,
        beside_BTH: Tensor,
    ) -> Tensor:
        """Run rows in halves where another peer has less memory than the one before."""
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
        work: Callable[[Shard, PassFailures], Awaitable[None]],
        is_pending: Callable[[Shard], bool],
    ) -> None:
        """Do something at the peer of each shard for which it is not done yet."""
        if not self._shards:
            return
        failures = self._asker.make_failures()

        async def do(block: int) -> None:
            shard = await self._find(block, failures)
            try:
                if shard is not None and is_pending(shard):
                    await work(shard, failures)
            except LostShardError:
                return  # and is found again by the loop

        while pending := [one for one in self._shards if one.hop is None or is_pending(one)]:
            await run_all(do(shard.span.start) for shard in pending)

    async def _bring(self, shard: Shard, failures: PassFailures) -> None:
        if shard.is_empty:
            return
        upload_id = UploadId(SessionId(secrets.token_bytes(16)))
        # Every state that is brought has a name of its own, or what is left of another one, with
        # other gradients, could be taken for it.
        mark = secrets.token_hex(8)
        # On another thread: tens of megabytes are copied and hashed.
        head, data = await asyncio.to_thread(shard.saved.pack, upload_id, mark)
        head = replace(head, replaces=shard.name)
        send = self._asker.send_adapter
        await self._try_link(shard, failures, lambda link: send(link, head, data))
        shard.name = head.adapter

    async def _run_forward(
        self, shard: Shard, span: Span, texts: Texts, failures: PassFailures
    ) -> Tensor:
        hop, named = shard.make_hop(span), shard.name_rows(texts)
        answer = await self._try(shard, failures, lambda: self._asker.ask_once(hop, named))
        return answer.hidden_BTH

    async def _run_backward(
        self,
        shard: Shard,
        span: Span,
        texts: Texts,
        grads_BTH: Tensor,
        failures: PassFailures,
        is_known: Callable[[], bool] = lambda: True,
    ) -> TextGradients:
        """Take gradients back through blocks, whose peer accumulates those of the adapter."""
        hop, named = shard.make_hop(span), shard.name_rows(texts)
        version, log, part = find_sharded(texts.adapters), shard.log[-1], next(self._part_numbers)
        is_accumulated = not shard.is_empty and version is not None and version.is_trained
        order = AccumulationOrder(log.number, part) if is_accumulated else None
        gradients = await self._try(
            shard, failures, lambda: self._asker.ask_once(hop, named, grads_BTH, order)
        )
        if shard.log[-1] is not log or not is_known():
            raise LostShardError  # its present peer does not have these gradients
        if is_accumulated:
            shard.note_pass(LoggedPass(span, texts, grads_BTH, part))
        return gradients

    async def _fetch_square_sum(self, shard: Shard, failures: PassFailures) -> None:
        """Note how large what was accumulated is."""
        asked = AdapterMeasure(make_pass_id(), shard.gradients)
        shard.square_sum = await self._try_link(
            shard, failures, lambda link: link.fetch_square_sum(asked, _PATIENCE_SECONDS)
        )

    async def _apply(self, shard: Shard, applied: AppliedUpdate, failures: PassFailures) -> None:
        asked = AdapterUpdate(make_pass_id(), shard.gradients, applied.settings, applied.factor)
        await self._try_link(
            shard, failures, lambda link: link.ask_kept(asked, patience_seconds=_PATIENCE_SECONDS)
        )
        shard.note_update(applied, make_updated_id(asked))

    async def _fetch_shard(self, shard: Shard, failures: PassFailures) -> None:
        """Note what is there now, to go on from."""
        asked, most_bytes = AdapterFetch(make_pass_id(), shard.name), shard.saved.most_bytes

        async def read(link: PassLink) -> LearnedState:
            with self._asker.carry(link.peer.peer_id, most_bytes) as seconds:
                patience_seconds = _PATIENCE_SECONDS + _PATIENCE * seconds
                fetched = link.fetch_adapter(asked, most_bytes, seconds, patience_seconds)
                head, data = await fetched
            return await asyncio.to_thread(shard.saved.read, head, data, shard.num_updates)

        shard.note_saved(await self._try_link(shard, failures, read))

    async def _try(
        self, shard: Shard, failures: PassFailures, ask: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Ask the peer of a shard, and once more if the answer is lost: nothing is done twice.

        Raises RefusedError for what no other peer would do either, else LostShardError.
        """
        try:
            try:
                return await ask()
            except SilentError:
                raise
            except UnavailableError:
                return await ask()
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code in _OF_THE_QUESTION:
                raise
            if shard.hop is not None:
                self._asker.note_failure(shard.hop, error, failures)
                shard.hop = None
            raise LostShardError from error

    async def _try_link(
        self, shard: Shard, failures: PassFailures, ask: Callable[[PassLink], Awaitable[Result]]
    ) -> Result:
        """Ask the peer of a shard over a link; raises what `_try` does."""
        hop = shard.held_at

        async def lend() -> Result:
            async with self._asker.lend(hop) as link:
                return await ask(link)

        return await self._try(shard, failures, lend)
