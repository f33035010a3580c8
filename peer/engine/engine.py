"""Compute for one span: steps of many sessions in, hidden states out. One thread only.

Tensor suffixes: B rows and T tokens of one step, N rows of all steps (batch times tokens),
H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...kernels.checkpoint import Checkpoint
from ...kernels.compress import has_only_finite
from ...kernels.linear import RowPrecision
from ...kernels.quantize import WeightFormat
from ...kernels.rotary import RotaryTable
from ...kernels.select import describe_kernels
from ...protocol.errors import ErrorCode, ModelError, RefusedError, ShoalError, UsageError
from ...protocol.fair_share import Holder
from ...protocol.spans import Span
from ...protocol.tensors import KVFormat
from .block_cache import BlockCache
from .families import read_spec
from .heap import keep_large_tensors_apart
from .kv_cache import PAGE_TOKENS, SessionCache
from .kv_pool import KVCachePool
from .loader import HostedBlock, ReportProgress, load_span
from .rows import Rotation, RowRange, Segment, Segments
from .scheduler import PART_TOKENS, SHORT_PART_TOKENS
from .spec import ModelShape

COMPUTE_DTYPES = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    # Precision is spent on the weights, where it buys speed. Exact activations let a replay
    # after a failure reproduce the same tokens.
    WeightFormat.INT8: torch.float32,
}
"""The dtype of activations and KV cache on the CPU."""


@dataclass(frozen=True)
class StepWork:
    """One step of one session, or a part of one, as the engine takes it.

    `span` is the range of hosted blocks that the session uses here, the one its cache was opened
    for. `hidden_BTH` may be of any float dtype. `row_map` reorders the rows of the cache first.
    `decoded` says that these tokens were computed one by one, or are a replay of such tokens:
    they get the numerics of single tokens, however many arrive at once.

    A part is made by `cut`; `num_behind` tokens of the step follow it.
    """

    cache: SessionCache
    span: Span
    position: int
    hidden_BTH: torch.Tensor
    row_map: tuple[int, ...] | None = None
    last_token_only: bool = False
    decoded: bool = False
    num_behind: int = 0

    @property
    def num_rows(self) -> int:
        """Sequences, B."""
        return self.hidden_BTH.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row, T."""
        return self.hidden_BTH.shape[1]

    def cut(self, first: int, num_tokens: int) -> StepWork:
        """Return a part of the step: `num_tokens` tokens from `first` on.

        Parts are to be executed in order. The result of the step is that of its parts joined: with
        int8 weights to the bit, if each but the last has a multiple of the tokens that
        `scheduler.count_part_tokens` returns for `Engine.part_tokens`, which the scheduler sees to.
        Float linears round the last digit by how many rows they multiply.
        """
        if num_tokens == self.num_tokens:
            return self
        stop = first + num_tokens
        return replace(
            self,
            position=self.position + first,
            hidden_BTH=self.hidden_BTH[:, first:stop],
            row_map=None if first else self.row_map,
            num_behind=self.num_tokens - stop,
        )


@dataclass(slots=True)
class _Step:
    """A step that was accepted, with its hidden states as they move through the blocks."""

    index: int
    work: StepWork
    precision: RowPrecision
    rotations: tuple[Rotation, ...]
    hidden_NH: torch.Tensor


class Engine:
    """The blocks of one span, ready to compute, and the KV cache of their sessions.

    A part of a prompt has at most `part_tokens` rows times tokens, or one token: few where it makes
    no difference to attention where a prompt is cut. An iteration takes as many parts as it has
    time for, and at least one. `kernels` says for people what computes here.
    """

    def __init__(
        self,
        spec: ModelShape,
        span: Span,
        blocks: Sequence[HostedBlock],
        rotary: Sequence[RotaryTable],
        pool: KVCachePool,
        weights: WeightFormat,
    ) -> None:
        self.spec = spec
        self.span = span
        self.dtype = pool.dtype
        self.pool = pool
        self.num_weight_bytes = sum(block.num_bytes for block in blocks)
        self.num_parameters = sum(block.num_parameters for block in blocks)
        self.kernels = describe_kernels(
            weights, [name for block in blocks for name in block.attention_kernels]
        )
        self._blocks = blocks
        can_cut = all(block.is_cut_anywhere for block in blocks)
        self.part_tokens = SHORT_PART_TOKENS if can_cut else PART_TOKENS
        self._rotary = rotary

    def __repr__(self) -> str:
        return f"<Engine {self.spec.family} {self.span}, {self.pool!r}>"

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        span: Span,
        weights: WeightFormat,
        *,
        device: str = "cpu",
        kv_budget_bytes: int,
        num_threads: int | None = None,
        on_progress: ReportProgress | None = None,
        cache: BlockCache | None = None,
        kept: Mapping[int, HostedBlock] | None = None,
    ) -> Engine:
        """Load the blocks of `span`; raises ModelError or UsageError before reading weights.

        `num_threads` sets torch's threads for the whole process; `on_progress(done, total)`
        counts blocks; `cache` spares quantizing blocks that were quantized before; `kept` are
        blocks that another engine had, by index.
        """
        if device != "cpu":
            raise UsageError(f"this version computes on the device cpu only, not on {device!r}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        spec = read_spec(checkpoint.config)
        rotary = _build_rotary(spec)
        dtype = COMPUTE_DTYPES[weights]
        pool = KVCachePool(kv_budget_bytes, len(span), spec.num_kv_heads, spec.head_dim, dtype)
        with torch.inference_mode(), keep_large_tensors_apart():
            blocks = load_span(checkpoint, spec, span, weights, dtype, on_progress, cache, kept)
        return cls(spec, span, blocks, rotary, pool, weights)

    def keep_blocks(self, span: Span) -> dict[int, HostedBlock]:
        """Return the blocks that another engine with this span need not load, by index."""
        indexes = range(self.span.start, self.span.stop)
        return {n: block for n, block in zip(indexes, self._blocks, strict=True) if n in span}

    def open_cache(
        self,
        num_rows: int,
        max_tokens: int,
        span: Span,
        holder: Holder | None = None,
        kv_format: KVFormat = KVFormat.FLOAT,
    ) -> SessionCache:
        """Lease KV memory for a session; raises RefusedError when it cannot be."""
        if not self.span.covers(span):
            raise RefusedError(
                ErrorCode.WRONG_SPAN, f"this peer hosts blocks {self.span}, not {span}"
            )
        if max_tokens > self.spec.max_positions:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"the model handles {self.spec.max_positions} tokens, not {max_tokens}",
            )
        return self.pool.open(num_rows, max_tokens, span, holder, kv_format)

    @torch.inference_mode()
    def execute(
        self, batch: Sequence[StepWork], before_block: Callable[[], object] | None = None
    ) -> list[torch.Tensor | ShoalError]:
        """Compute all steps together; each gets its hidden states [B, T or 1, H] or its error.

        `before_block` is called before each block, and may execute steps of other sessions.

        A refused step disturbs no other. Steps of one session need batches of their own. A
        refusal leaves the step's cache as it was, except that a result that is not finite is only
        known after the rollback and the reordering that the step asked for. The compute thread,
        behind which more steps of the session wait, takes the cache back to what is left.
        """
        results: list[torch.Tensor | ShoalError] = [
            RefusedError(ErrorCode.INTERNAL, "the step was not computed") for _ in batch
        ]
        steps = self._accept(batch, results)
        self._compute(steps, before_block)
        for step in steps:
            results[step.index] = _finish(step)
        return results

    def _accept(
        self, batch: Sequence[StepWork], results: list[torch.Tensor | ShoalError]
    ) -> list[_Step]:
        """Check every step and prepare its cache; refusals go into `results`."""
        steps: list[_Step] = []
        accepted_caches: set[SessionCache] = set()
        for index, work in enumerate(batch):
            try:
                if work.cache in accepted_caches:
                    raise RefusedError(ErrorCode.INTERNAL, "a session has two steps in one batch")
                steps.append(self._prepare(index, work))
                accepted_caches.add(work.cache)
            except RefusedError as refusal:
                # Without its frames, which hold the batch: they hold these results, too.
                results[index] = copy(refusal)
        # Steps of one precision lie side by side, so that each linear runs once for each.
        return sorted(steps, key=lambda step: step.precision is RowPrecision.ONE_DIGIT)

    def _prepare(self, index: int, work: StepWork) -> _Step:
        self._check(work)
        num_rows, num_tokens, hidden_size = work.hidden_BTH.shape
        hidden_NH = work.hidden_BTH.to(self.dtype).reshape(num_rows * num_tokens, hidden_size)
        if not has_only_finite(hidden_NH):
            raise RefusedError(ErrorCode.BAD_VALUES, "the hidden states are not finite")
        work.cache.prepare(work.position, num_tokens, work.row_map, work.num_behind)
        # Not by the number of rows: that depends on how a prompt was cut into steps.
        precision = RowPrecision.TWO_DIGITS if work.decoded else RowPrecision.ONE_DIGIT
        rotations = tuple(table.rows(work.position, num_tokens) for table in self._rotary)
        return _Step(index, work, precision, rotations, hidden_NH)

    def _check(self, work: StepWork) -> None:
        if work.span != work.cache.span:
            raise RefusedError(
                ErrorCode.WRONG_SPAN,
                f"the session was opened for blocks {work.cache.span}, not {work.span}",
            )
        hidden_BTH = work.hidden_BTH
        if hidden_BTH.dim() != 3 or not hidden_BTH.is_floating_point():
            raise RefusedError(
                ErrorCode.BAD_VALUES, "hidden states are floats [rows, tokens, size]"
            )
        num_rows, _, hidden_size = hidden_BTH.shape
        if num_rows != work.cache.num_rows or hidden_size != self.spec.hidden_size:
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"the session needs hidden states of {work.cache.num_rows} rows and size "
                f"{self.spec.hidden_size}, not {num_rows} and {hidden_size}",
            )

    def _compute(self, steps: Sequence[_Step], before_block: Callable[[], object] | None) -> None:
        """Move every step's hidden states through its blocks, together wherever they overlap."""
        for stretch, active in _cut_stretches(steps):
            hidden_NH = _join([step.hidden_NH for step in active])
            placed, ranges = _lay_out(active)
            segments = Segments(placed)
            for index in range(stretch.start, stretch.stop):
                if before_block is not None:
                    before_block()
                hidden_NH = self._blocks[index - self.span.start](hidden_NH, segments, ranges)
            for step, segment in zip(active, placed, strict=True):
                step.hidden_NH = hidden_NH[segment.start : segment.stop]


def check_kv_budget(spec: ModelShape, span: Span, weights: WeightFormat, budget_bytes: int) -> None:
    """Raise UsageError when not even one page of one session fits into the budget."""
    pool = KVCachePool(
        budget_bytes, len(span), spec.num_kv_heads, spec.head_dim, COMPUTE_DTYPES[weights]
    )
    needed_bytes = PAGE_TOKENS * len(span) * pool.token_bytes
    if budget_bytes < needed_bytes:
        raise UsageError(
            f"{budget_bytes} bytes of KV memory hold no session: {len(span)} blocks of this model "
            f"need {needed_bytes} bytes at least, and as much again for each {PAGE_TOKENS} tokens "
            "(--kv-memory)"
        )


def _build_rotary(spec: ModelShape) -> list[RotaryTable]:
    """Return one table for each of the model's ropes."""
    try:
        return [RotaryTable.build(spec.head_dim, spec.max_positions, rope) for rope in spec.ropes]
    except (ValueError, TypeError, LookupError) as error:
        raise ModelError(f"config.json: rotary parameters are not usable: {error}") from error


def _cut_stretches(steps: Sequence[_Step]) -> Iterator[tuple[Span, list[_Step]]]:
    """Yield the maximal spans through which the same steps go, in order, with these steps.

    ::

        step A   [0 ............... 6)
        step B             [3 ........... 8)
        yields   0:3 A     3:6 A B   6:8 B
    """
    edges = {step.work.span.start for step in steps} | {step.work.span.stop for step in steps}
    for start, stop in pairwise(sorted(edges)):
        stretch = Span(start, stop)
        active = [step for step in steps if step.work.span.covers(stretch)]
        if active:
            yield stretch, active


def _lay_out(steps: Sequence[_Step]) -> tuple[list[Segment], list[RowRange]]:
    """Place the steps' rows one after the other; ranges of one precision are merged."""
    segments: list[Segment] = []
    ranges: list[RowRange] = []
    start = 0
    for step in steps:
        num_rows, num_tokens, _ = step.work.hidden_BTH.shape
        stop = start + num_rows * num_tokens
        segments.append(
            Segment(
                start=start,
                stop=stop,
                num_rows=num_rows,
                num_tokens=num_tokens,
                position=step.work.position,
                is_decoded=step.work.decoded,
                cache=step.work.cache,
                rotations=step.rotations,
            )
        )
        if ranges and ranges[-1].precision is step.precision:
            ranges[-1] = replace(ranges[-1], stop=stop)
        else:
            ranges.append(RowRange(start, stop, step.precision))
        start = stop
    return segments, ranges


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _finish(step: _Step) -> torch.Tensor | ShoalError:
    """Commit a step whose result is sound, and shape the result."""
    num_rows, num_tokens, hidden_size = step.work.hidden_BTH.shape
    if not has_only_finite(step.hidden_NH):
        step.work.cache.abandon()
        return RefusedError(ErrorCode.BAD_VALUES, "these hidden states make the blocks overflow")
    step.work.cache.commit(num_tokens)
    hidden_BTH = step.hidden_NH.view(num_rows, num_tokens, hidden_size)
    return hidden_BTH[:, -1:].contiguous() if step.work.last_token_only else hidden_BTH
