"""Compute for one span: steps of many sessions in, hidden states out. One thread only.

Tensor suffixes: B rows and T tokens of one step, N tokens of all steps (rows times tokens),
L blocks, P positions with deep prompts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

from ...kernels.attention.rotary import RotaryTable
from ...kernels.linear.select import describe_kernels
from ...kernels.wire_tensors import list_finite
from ...models.specs.model_spec import ModelShape
from ...protocol.errors import ErrorCode, RefusedError, ShoalError
from ...protocol.spans import Span
from .blocks.batch import PART_TOKENS, SHORT_PART_TOKENS, HostedBlock
from .cache.kv_cache import KVCachePool, SessionCache
from .decode_graphs import TOKEN_COUNTS, DecodeGraphs
from .devices.device import Numerics
from .passes.span_passes import SpanPasses
from .steps import AcceptedStep, StepGroup, StepWork, group_steps, join

_NOT_COMPUTED = RefusedError(ErrorCode.INTERNAL, "the step was not computed")


class Engine:
    """The blocks of one span, ready to compute, and the KV cache of their sessions.

    `execute` computes steps of sessions; `passes` runs forward and backward passes. `pool` is the
    memory of the sessions' caches. A part of a prompt has at most `part_tokens` rows times tokens,
    or one token: few if attention gives the same wherever a prompt is cut. An iteration takes as
    many parts as it has time for, and at least one. `kernels` names for people what computes here.
    """

    def __init__(
        self,
        spec: ModelShape,
        span: Span,
        blocks: Sequence[HostedBlock],
        rotary: Sequence[RotaryTable],
        pool: KVCachePool,
        numerics: Numerics,
    ) -> None:
        self.spec = spec
        self.span = span
        self.dtype = pool.dtype
        self.pool = pool
        self.device = numerics.device
        self.passes = SpanPasses(spec, span, blocks, rotary, numerics)
        self.num_weight_bytes = sum(block.num_bytes for block in blocks)
        self.kernels = describe_kernels(
            numerics.weights,
            [name for block in blocks for name in block.attention_kernels],
            numerics.device.torch_device.type,
        )
        # On a device, fewer tokens would take as long.
        can_cut = self.device.paged_attention is None and all(b.is_cut_anywhere for b in blocks)
        self.part_tokens = SHORT_PART_TOKENS if can_cut else PART_TOKENS
        self._exact_part_tokens = self.part_tokens if numerics.has_float32_weights else None
        self._blocks = blocks
        self._rotary = rotary
        self._graphs = DecodeGraphs.make(blocks, numerics.device)

    @property
    def row_counts_to_capture(self) -> tuple[int, ...]:
        """Rows of generated tokens that the device takes longer for the first time than later."""
        return () if self._graphs is None else TOKEN_COUNTS

    def __repr__(self) -> str:
        return f"<Engine {self.spec.family} {self.span}, {self.pool!r}>"

    def keep_blocks(self, span: Span) -> dict[int, HostedBlock]:
        """Return the blocks that another engine with this span need not load, by index."""
        indexes = range(self.span.start, self.span.stop)
        return {n: block for n, block in zip(indexes, self._blocks, strict=True) if n in span}

    def place_prompts(self, prompts_LBPH: torch.Tensor) -> torch.Tensor:
        """Return deep prompts as a cache of this engine keeps them."""
        return prompts_LBPH.to(self.device.torch_device, self.dtype)

    @torch.inference_mode()
    def execute(
        self, batch: Sequence[StepWork], give_way: Callable[[], object] | None = None
    ) -> list[torch.Tensor | ShoalError]:
        """Compute all steps together; each gets its hidden states [B, T or 1, H] or its error.

        `give_way` is called before each block, and between the products of adapters; it may
        execute steps of other sessions.

        A refused step disturbs no other. Steps of one session need batches of their own. A
        refusal leaves the step's cache as it was, with one exception: that a result is not finite
        is known only after the rollback and the reordering that the step asked for. The compute
        thread, which holds later steps of the session, takes the cache back to what is left.
        """
        results: list[torch.Tensor | ShoalError] = [_NOT_COMPUTED] * len(batch)
        with self.device.running():
            steps = self._accept(batch, results)
            if not steps:
                return results
            hidden_NH = self.device.bring(join([step.hidden_NH for step in steps]))
            for group in group_steps(steps, self._rotary):
                hidden_NH = group.put(
                    self._run_blocks(group, group.pick(hidden_NH), give_way), hidden_NH
                )
            hidden_NH = self.device.fetch(hidden_NH)
        outputs = hidden_NH.split([len(step.hidden_NH) for step in steps])
        for step, output_NH, is_finite in zip(steps, outputs, list_finite(outputs), strict=True):
            results[step.index] = step.finish(output_NH, is_finite)
        return results

    def _accept(
        self, batch: Sequence[StepWork], results: list[torch.Tensor | ShoalError]
    ) -> list[AcceptedStep]:
        """Check every step and prepare its cache; refusals go into `results`."""
        steps: list[AcceptedStep] = []
        accepted_caches: set[SessionCache] = set()
        hidden = [
            work.hidden_BTH.to(self.dtype).reshape(-1, self.spec.hidden_size) for work in batch
        ]
        are_finite = list_finite(hidden)
        for index, work in enumerate(batch):
            try:
                if work.cache in accepted_caches:
                    raise RefusedError(ErrorCode.INTERNAL, "a session has two steps in one batch")
                steps.append(
                    AcceptedStep.accept(
                        index,
                        work,
                        hidden[index],
                        are_finite[index],
                        self._rotary,
                        self._exact_part_tokens,
                    )
                )
                accepted_caches.add(work.cache)
            except RefusedError as refusal:
                # Without its frames, which hold the batch: they hold these results, too.
                results[index] = copy(refusal)
        # Steps of one precision lie side by side, so that each linear runs once for each.
        return sorted(steps, key=AcceptedStep.sort_key)

    def _run_blocks(
        self, group: StepGroup, hidden_NH: torch.Tensor, give_way: Callable[[], object] | None
    ) -> torch.Tensor:
        """Move hidden states through the blocks that their steps have in common."""
        batch, span = group.batch, group.span
        graphs = self._graphs if group.is_plain and span == self.span else None
        if graphs is not None and graphs.can_run(batch):
            if give_way is not None:
                give_way()
            return graphs.run(hidden_NH, batch)
        blocks = self._blocks[span.start - self.span.start :][: len(span)]
        for index, block in enumerate(blocks, span.start):
            if give_way is not None:
                give_way()
            hidden_NH = group.add_prompts(hidden_NH, index)
            ranges = group.find_ranges(index, block.linears, give_way)
            hidden_NH = block(hidden_NH, batch, ranges)
        return hidden_NH
