"""Forward and backward passes of batches through the swarm; lost peers are replaced.

Passes are stateless: a peer that is lost is replaced by any other that hosts the blocks, which gets
the same tensors again. So the client keeps what it sent to each hop until the way back is over.

Tensor suffixes: B rows, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...protocol.errors import ErrorCode, RefusedError, UsageError
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterGradients, add_gradients, find_sharded
from ..concurrency.tasks import run_all
from ..optimizer_shards.sharded_optimizer import ShardedOptimizer
from ..passes.microbatches import (
    MOST_TOKENS,
    HopInput,
    MicrobatchInputs,
    TextGradients,
    Texts,
    cut_rows,
    halve,
    join_gradients,
)
from ..passes.pass_asking import PassAsker
from ..publishing.publisher import Publisher
from ..routing.route import Failover, Hop

_FORWARDS_BEFORE_GROWTH = 32
"""So many fit before larger microbatches are tried: a peer that had no memory may have some by now,
or be gone. One that never has any declines seldom, and one that is gone is forgotten in minutes."""


class RemotePasses:
    """Sends batches through frozen remote blocks. Owned by the client's loop."""

    def __init__(self, asker: PassAsker) -> None:
        """Owns the asker, and closes it."""
        self._asker = asker
        self.publisher = Publisher(asker)
        self._optimizers: WeakValueDictionary[str, ShardedOptimizer] = WeakValueDictionary()
        self._most_tokens = MOST_TOKENS
        self._num_forwards = 0  # since that changed

    def can_run(self, span: Span) -> bool:
        """Return whether there is a peer that takes passes for each block of a span."""
        return all(self._asker.has_host(block) for block in range(span.start, span.stop))

    async def run_forward(self, span: Span, texts: Texts) -> tuple[Tensor, list[MicrobatchInputs]]:
        """Return the hidden states behind the last block of a span, and what went into the hops.

        Raises RouteError with the blocks that nobody serves in time, RefusedError when peers
        decline the texts themselves, and what the last of many peers did that were found and lost.
        """
        num_tokens, num_hops = texts.hidden_BTH.shape[1], self._asker.guess_num_hops(span)
        batches = cut_rows(texts.num_rows, num_tokens, num_hops, self._most_tokens, texts.most_rows)
        done = await run_all(self._forward_rows(span, texts, rows) for rows in batches)
        self._num_forwards += 1
        if self._num_forwards > _FORWARDS_BEFORE_GROWTH:
            self._most_tokens, self._num_forwards = min(MOST_TOKENS, 2 * self._most_tokens), 0
        ways = [way for ways in done for way in ways]
        return torch.cat([output_BTH for output_BTH, _ in ways]), [inputs for _, inputs in ways]

    async def run_backward(
        self, saved: Sequence[MicrobatchInputs], grads_BTH: Tensor
    ) -> TextGradients:
        """Return the gradients of what went into `run_forward`, given those of what came out.

        May be called again for the same inputs. Raises what `run_forward` does.
        """
        gradients = await run_all(self._backward(one.inputs, grads_BTH[one.rows]) for one in saved)
        return join_gradients(gradients, saved[0].inputs[0].texts.shares_prompts)

    async def make_sharded_optimizer(self) -> ShardedOptimizer:
        """Return the optimizer of an adapter that peers are to train."""
        optimizer = ShardedOptimizer(self._asker)
        self._optimizers[optimizer.lineage] = optimizer
        return optimizer

    async def take_recent_hops(self) -> list[Hop]:
        """Return the hops that answered since this was called last, in the order of blocks."""
        return self._asker.failovers.take_recent_hops()

    async def take_failovers(self) -> list[Failover]:
        """Return which peers were lost since this was called last, and their replacements."""
        return self._asker.failovers.take()

    async def close(self) -> None:
        """Withdraw published adapters, and close all connections."""
        try:
            await self.publisher.close()
        finally:
            await self._asker.close()

    async def _forward_rows(
        self, span: Span, texts: Texts, rows: slice
    ) -> list[tuple[Tensor, MicrobatchInputs]]:
        """Take some rows through a span; in two halves if a peer has no memory for them."""
        part = texts.take_rows(rows)
        try:
            output_BTH, inputs = await self._forward(span, part)
        except RefusedError as error:
            self._take_less(error, part)
        else:
            return [(output_BTH, MicrobatchInputs(rows, inputs))]
        halves = halve(rows)
        done = await run_all(self._forward_rows(span, texts, half) for half in halves)
        return [way for ways in done for way in ways]

    async def _forward(
        self, span: Span, texts: Texts, weights: str | None = None
    ) -> tuple[Tensor, list[HopInput]]:
        """Take one microbatch through a span, hop by hop; through `weights` only if given."""
        inputs: list[HopInput] = []
        rest, start = texts, span.start
        while start < span.stop:
            answer = await self._choose_asker(rest).ask_forward(
                Span(start, span.stop), rest, weights
            )
            num_blocks = len(answer.span)
            part = rest.take_blocks(slice(0, num_blocks))
            inputs.append(HopInput(answer.span, part, answer.weights))
            rest = rest.take_blocks(slice(num_blocks, None)).move_to(answer.hidden_BTH)
            start = answer.span.stop
        return rest.hidden_BTH, inputs

    async def _backward(self, inputs: Sequence[HopInput], grads_BTH: Tensor) -> TextGradients:
        """Take the gradients of one microbatch back along its way."""
        prompts: list[Tensor] = []
        adapters: list[AdapterGradients] = []
        for sent in reversed(inputs):
            gradients = await self._go_back(sent, grads_BTH)
            grads_BTH = gradients.hidden_BTH
            adapters.append(gradients.adapters)
            if gradients.prompts_LBPH is not None:
                prompts.insert(0, gradients.prompts_LBPH)
        joined = torch.cat(prompts) if prompts else None
        return TextGradients(grads_BTH, joined, add_gradients(adapters))

    async def _go_back(self, sent: HopInput, grads_BTH: Tensor) -> TextGradients:
        """Take gradients back through one hop; in two halves if a peer has no memory for them."""
        span, texts = sent.span, sent.texts
        try:
            asker = self._choose_asker(texts)
            gradients = await asker.ask_backward(span, texts, grads_BTH, sent.weights)
            return gradients or await self._go_back_in_parts(sent, grads_BTH)
        except RefusedError as error:
            self._take_less(error, texts)
        halves = halve(slice(0, texts.num_rows))
        parts = await run_all(
            self._go_back(replace(sent, texts=texts.take_rows(half)), grads_BTH[half])
            for half in halves
        )
        return join_gradients(parts, texts.shares_prompts)

    async def _go_back_in_parts(self, sent: HopInput, grads_BTH: Tensor) -> TextGradients:
        """Take gradients back through blocks that one peer hosted and several do now.

        The inputs of the others have to be computed first.
        """
        _, inputs = await self._forward(sent.span, sent.texts, sent.weights)
        return await self._backward(inputs, grads_BTH)

    def _choose_asker(self, texts: Texts) -> PassAsker | ShardedOptimizer:
        """Return what knows which peers may take texts."""
        version = find_sharded(texts.adapters)
        if version is None:
            return self._asker
        optimizer = self._optimizers.get(version.lineage)
        if optimizer is None:
            raise UsageError(
                "the peers that trained this adapter were released, or belong to another model: "
                "call backward() before the optimizer is closed"
            )
        return optimizer

    def _take_less(self, error: RefusedError, texts: Texts) -> None:
        """Remember that a peer has no memory for so much at once; raises any other error."""
        if error.code is not ErrorCode.OUT_OF_MEMORY or texts.num_rows == 1:
            raise error
        self._most_tokens = min(self._most_tokens, max(1, texts.num_tokens // 2))
        self._num_forwards = 0
