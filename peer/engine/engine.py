"""Compute for one span: steps of many sessions in, hidden states out. One thread only.

Tensor suffixes: B rows and T tokens of one step, N rows of all steps (batch times tokens),
H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import torch

from ...kernels.attention.rotary import RotaryTable
from ...kernels.linear.linear import RowPrecision
from ...kernels.linear.quantize import WeightFormat
from ...kernels.linear.select import describe_kernels
from ...kernels.wire_tensors import has_only_finite
from ...models.checkpoints.checkpoint import Checkpoint
from ...models.spec_reader import read_spec
from ...models.specs.model_spec import ModelShape, ModelSpec
from ...protocol.errors import ErrorCode, ModelError, RefusedError, ShoalError, UsageError
from ...protocol.fair_share import Holder
from ...protocol.limits import MAX_ADAPTER_BYTES
from ...protocol.spans import Span
from ...protocol.tensors import KVFormat
from .adapters.adapters import Adapter, read_adapter
from .adapters.trained_adapter import TrainedAdapter
from .blocks.cuda_device import choose_device
from .blocks.device import Device
from .blocks.numerics import Numerics
from .blocks.rows import RowRange, Segments
from .cache.kv_cache import SessionCache
from .cache.kv_memory import PAGE_TOKENS
from .cache.kv_pool import KVCachePool
from .decode_graphs import ROW_COUNTS, DecodeGraphs
from .heap import keep_large_tensors_apart
from .loading.block_cache import BlockCache
from .loading.loader import HostedBlock, ReportProgress, load_span
from .passes.passes import GiveWay, Gradients, Passes, PassWork
from .scheduler import PART_TOKENS, SHORT_PART_TOKENS, count_part_tokens
from .step_prompts import PromptedSegment, add_prompts, find_prompts
from .steps import AcceptedStep, StepWork, adapt, cut_stretches, lay_out


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
        numerics: Numerics,
    ) -> None:
        self.spec = spec
        self.span = span
        self.dtype = pool.dtype
        self.pool = pool
        self.num_weight_bytes = sum(block.num_bytes for block in blocks)
        self.num_parameters = sum(block.num_parameters for block in blocks)
        self.kernels = describe_kernels(
            numerics.weights,
            [name for block in blocks for name in block.attention_kernels],
            numerics.device.place.type,
        )
        self._blocks = blocks
        self._device = numerics.device
        self._graphs = _make_graphs(blocks, numerics.device)
        self._is_exact = numerics.weights is WeightFormat.FP32
        can_cut = all(block.is_cut_anywhere for block in blocks)
        self.part_tokens = SHORT_PART_TOKENS if can_cut else PART_TOKENS
        self._rotary = rotary
        self._passes = Passes(spec, span, blocks, rotary, numerics)

    @property
    def row_counts_to_capture(self) -> tuple[int, ...]:
        """Rows of generated tokens that the device takes longer for the first time than later."""
        return () if self._graphs is None else ROW_COUNTS

    def __repr__(self) -> str:
        return f"<Engine {self.spec.family} {self.span}, {self.pool!r}>"

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        span: Span,
        weights: WeightFormat,
        *,
        device: str | Device = "cpu",
        kv_budget_bytes: int,
        num_threads: int | None = None,
        on_progress: ReportProgress | None = None,
        cache: BlockCache | None = None,
        kept: Mapping[int, HostedBlock] | None = None,
    ) -> Engine:
        """Load the blocks of `span`; raises ModelError or UsageError before reading weights.

        `device` is one, or what `choose_device` knows it by; `num_threads` sets torch's threads for
        the whole process; `on_progress(done, total)` counts blocks; `cache` spares quantizing
        blocks that were quantized before; `kept` are blocks that another engine had, by index.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        spec = read_spec(checkpoint.config)
        numerics = Numerics(weights, choose_device(device) if isinstance(device, str) else device)
        try:
            rotary = _build_rotary(spec, numerics)
            pool = _open_pool(spec, span, numerics, kv_budget_bytes)
            # Not in inference mode: autograd could not use weights that were made there.
            with torch.no_grad(), keep_large_tensors_apart():
                blocks = load_span(checkpoint, spec, span, numerics, on_progress, cache, kept)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"{numerics.device.place} has no memory for blocks {span} and {kv_budget_bytes} "
                "bytes of KV cache; serve fewer blocks (--num-blocks), or give sessions less "
                "memory (--kv-memory)"
            ) from error
        return cls(spec, span, blocks, rotary, pool, numerics)

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

    def read_adapter(self, config: bytes, tensors: bytes) -> Adapter:
        """Return what an adapter has for the span; raises RefusedError that says what is wrong.

        Any thread may do it, which takes a while: passes and steps need `place_adapter` of it.
        """
        if not isinstance(self.spec, ModelSpec):
            raise RefusedError(
                ErrorCode.BAD_VALUES,
                f"models of type {self.spec.family!r} run through transformers here, where "
                "adapters are not applied",
            )
        most_bytes = MAX_ADAPTER_BYTES + len(config)
        return read_adapter(config, tensors, self.spec, self.span, most_bytes)

    def place_adapter(self, adapter: Adapter | TrainedAdapter) -> Adapter | TrainedAdapter:
        """Return an adapter on the engine's device."""
        return adapter.move_to(self._device.place)

    def place_prompts(self, prompts_LBPH: torch.Tensor) -> torch.Tensor:
        """Return deep prompts as a cache of this engine keeps them."""
        return prompts_LBPH.to(self._device.place, self.dtype)

    def run_forward(self, work: PassWork, give_way: GiveWay) -> torch.Tensor:
        """Return what texts become without a cache, [B, T, H]; raises RefusedError.

        See `Passes` for what it costs and when `give_way` is called.
        """
        return self._passes.run_forward(work, give_way)

    def run_backward(self, work: PassWork, grads_BTH: torch.Tensor, give_way: GiveWay) -> Gradients:
        """Return gradients of what went into such a pass, given those of its result."""
        return self._passes.run_backward(work, grads_BTH, give_way)

    def keep_pass_inputs(self, budget_bytes: int) -> None:
        """Keep what went into the blocks in so much memory, for who comes back with gradients."""
        self._passes.kept_inputs.limit(budget_bytes)

    def estimate_pass_bytes(
        self, num_blocks: int, num_rows: int, num_tokens: int, *, is_backward: bool
    ) -> int:
        """Return about the most memory that a pass of this size takes, before it is begun."""
        return self._passes.estimate_bytes(
            num_blocks, num_rows, num_tokens, is_backward=is_backward
        )

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
        with self._device.running():
            steps = self._accept(batch, results)
            self._compute(steps, before_block)
            outputs = self._device.fetch([step.hidden_NH for step in steps])
        for step, output_NH in zip(steps, outputs, strict=True):
            results[step.index] = _finish(step, output_NH)
        return results

    def _accept(
        self, batch: Sequence[StepWork], results: list[torch.Tensor | ShoalError]
    ) -> list[AcceptedStep]:
        """Check every step and prepare its cache; refusals go into `results`."""
        steps: list[AcceptedStep] = []
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
        return sorted(
            steps,
            key=lambda step: (
                step.piece_tokens is not None,
                step.precision is RowPrecision.ONE_DIGIT,
            ),
        )

    def _prepare(self, index: int, work: StepWork) -> AcceptedStep:
        self._check(work)
        num_rows, num_tokens, hidden_size = work.hidden_BTH.shape
        hidden_NH = work.hidden_BTH.to(self.dtype).reshape(num_rows * num_tokens, hidden_size)
        if not has_only_finite(hidden_NH):
            raise RefusedError(ErrorCode.BAD_VALUES, "the hidden states are not finite")
        work.cache.prepare(work.position, num_tokens, work.row_map, work.num_behind)
        # Not by the number of rows: that depends on how a prompt was cut into steps.
        precision = RowPrecision.TWO_DIGITS if work.decoded else RowPrecision.ONE_DIGIT
        rotations = tuple(table.rows(work.position, num_tokens) for table in self._rotary)
        pieces = self._choose_piece_tokens(work)
        return AcceptedStep(index, work, precision, rotations, hidden_NH, pieces)

    def _choose_piece_tokens(self, work: StepWork) -> int | None:
        """Return how many tokens linears take at once where more would change a result.

        Float32 linears round the last digit by how many rows they multiply. In a cache of integers
        that may tip one, and then a session's words would depend on who computes beside it.
        """
        if not self._is_exact or not work.cache.keeps_integers:
            return None
        return 1 if work.decoded else count_part_tokens(work.num_rows, self.part_tokens)

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

    def _compute(
        self, steps: Sequence[AcceptedStep], before_block: Callable[[], object] | None
    ) -> None:
        """Move every step's hidden states through its blocks, together wherever they overlap."""
        brought = self._device.bring([step.hidden_NH for step in steps])
        for step, hidden_NH in zip(steps, brought, strict=True):
            step.hidden_NH = hidden_NH
        for stretch, active in cut_stretches(steps):
            hidden_NH = _join([step.hidden_NH for step in active])
            placed, ranges = lay_out(active)
            segments = Segments(placed, self._rotary)
            prompts = find_prompts(active, placed, stretch)
            is_adapted = any(step.work.adapter is not None for step in active)
            has_pieces = any(step.piece_tokens is not None for step in active)
            graphs = None if is_adapted or has_pieces or prompts else self._graphs
            if graphs is not None and stretch == self.span and graphs.can_run(segments):
                if before_block is not None:
                    before_block()
                hidden_NH = graphs.run(hidden_NH, segments.paged_rows[0])
            else:
                blocks = self._blocks[stretch.start - self.span.start :][: len(stretch)]
                ranges_of_blocks = [
                    adapt(ranges, active, placed, index, block.linears) if is_adapted else ranges
                    for index, block in enumerate(blocks, stretch.start)
                ]
                hidden_NH = _run_blocks(
                    blocks, hidden_NH, segments, ranges_of_blocks, before_block, prompts
                )
            for step, segment in zip(active, placed, strict=True):
                step.hidden_NH = hidden_NH[segment.start : segment.stop]


def check_kv_budget(spec: ModelShape, span: Span, numerics: Numerics, budget_bytes: int) -> None:
    """Raise UsageError when not even one page of one session fits into the budget."""
    layouts = numerics.device.make_layouts(spec.num_kv_heads, spec.head_dim, numerics.dtype)
    needed_bytes = PAGE_TOKENS * len(span) * layouts[KVFormat.FLOAT].token_bytes
    if budget_bytes < needed_bytes:
        raise UsageError(
            f"{budget_bytes} bytes of KV memory (--kv-memory) are too few for a session: "
            f"{len(span)} blocks of this model need {needed_bytes} bytes for every {PAGE_TOKENS} "
            "tokens"
        )


def _open_pool(spec: ModelShape, span: Span, numerics: Numerics, budget_bytes: int) -> KVCachePool:
    store = numerics.device.open_store(
        budget_bytes, span, spec.num_kv_heads, spec.head_dim, numerics.dtype
    )
    return KVCachePool(budget_bytes, store)


def _build_rotary(spec: ModelShape, numerics: Numerics) -> list[RotaryTable]:
    """Return one table for each of the model's ropes."""
    try:
        return [
            RotaryTable.build(spec.head_dim, spec.max_positions, rope).to(numerics.device.place)
            for rope in spec.ropes
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise ModelError(f"config.json: rotary parameters are not usable: {error}") from error


def _make_graphs(blocks: Sequence[HostedBlock], device: Device) -> DecodeGraphs | None:
    """Return what captures decode steps, where the device can and the blocks allow it."""
    if device.capturer is None or not all(block.has_fixed_shapes for block in blocks):
        return None

    def compute(hidden_NH: torch.Tensor, segments: Segments) -> torch.Tensor:
        ranges = [RowRange(0, len(hidden_NH), RowPrecision.TWO_DIGITS)]
        return _run_blocks(blocks, hidden_NH, segments, [ranges] * len(blocks), None)

    return DecodeGraphs(compute, device.capturer)


def _run_blocks(
    blocks: Sequence[HostedBlock],
    hidden_NH: torch.Tensor,
    segments: Segments,
    ranges_of_blocks: Sequence[Sequence[RowRange]],
    before_block: Callable[[], object] | None,
    prompts: Sequence[PromptedSegment] = (),
) -> torch.Tensor:
    for place, (block, ranges) in enumerate(zip(blocks, ranges_of_blocks, strict=True)):
        if before_block is not None:
            before_block()
        hidden_NH = add_prompts(hidden_NH, prompts, place)
        hidden_NH = block(hidden_NH, segments, ranges)
    return hidden_NH


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _finish(step: AcceptedStep, output_NH: torch.Tensor) -> torch.Tensor | ShoalError:
    """Commit a step whose result is sound, and shape the result."""
    num_rows, num_tokens, hidden_size = step.work.hidden_BTH.shape
    if not has_only_finite(output_NH):
        step.work.cache.abandon()
        return RefusedError(ErrorCode.BAD_VALUES, "these hidden states make the blocks overflow")
    step.work.cache.commit(num_tokens)
    hidden_BTH = output_NH.view(num_rows, num_tokens, hidden_size)
    return hidden_BTH[:, -1:].contiguous() if step.work.last_token_only else hidden_BTH
