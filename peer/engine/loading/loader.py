"""Loads the blocks of a span, ours or transformers' own, and checks first that it can."""

from collections.abc import Callable, Mapping, Sequence

from ....kernels.linear.quantize import ON_CPUS, WeightFormat
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.specs.model_spec import ModelShape, ModelSpec
from ....protocol.errors import UsageError
from ....protocol.spans import Span
from ..blocks.batch import HostedBlock
from ..devices.device import CpuDevice, Numerics
from ..devices.device_names import NO_NF4
from .block_cache import BlockCache
from .block_loader import load_block

ReportProgress = Callable[[int, int], None]


def load_span(
    checkpoint: Checkpoint,
    spec: ModelShape,
    span: Span,
    numerics: Numerics,
    on_progress: ReportProgress | None = None,
    cache: BlockCache | None = None,
    kept: Mapping[int, HostedBlock] | None = None,
) -> Sequence[HostedBlock]:
    """Load the blocks of a span in order; `on_progress(done, total)` counts blocks.

    Those that were `kept`, by index, are taken as they are. Needs memory for the result and less
    than one block in float32 on its way, whatever the size of the checkpoint. `cache` is used for
    int8 weights; the others are only copied.
    """
    check_span(spec, span)
    check_weights(spec, numerics)
    load = _choose_loader(checkpoint, spec, numerics, cache)
    kept = kept or {}
    blocks: list[HostedBlock] = []
    for index in range(span.start, span.stop):
        blocks.append(kept[index] if index in kept else load(index))
        if on_progress is not None:
            on_progress(len(blocks), len(span))
    return blocks


def _choose_loader(
    checkpoint: Checkpoint,
    spec: ModelShape,
    numerics: Numerics,
    cache: BlockCache | None,
) -> Callable[[int], HostedBlock]:
    if isinstance(spec, ModelSpec):
        return lambda index: load_block(checkpoint, spec, index, numerics, cache)
    from ..blocks.wrapped import WrappedLoader  # transformers takes seconds to import

    return WrappedLoader(checkpoint, numerics).load


def check_span(spec: ModelShape, span: Span) -> None:
    """Raise UsageError if the model has no such blocks."""
    if span.stop > spec.num_blocks:
        raise UsageError(
            f"the model has blocks 0:{spec.num_blocks}, the span {span} reaches beyond them"
        )


def check_weights(spec: ModelShape, numerics: Numerics) -> None:
    """Raise UsageError if the model's blocks cannot hold their weights in this format there."""
    if numerics.weights not in ON_CPUS and isinstance(numerics.device, CpuDevice):
        raise UsageError(NO_NF4)
    is_float = numerics.weights in (WeightFormat.BF16, WeightFormat.FP32)
    if not is_float and not isinstance(spec, ModelSpec):
        raise UsageError(
            f"models of type {spec.family!r} run through transformers, which needs float weights; "
            "use --weights bf16 or fp32"
        )
