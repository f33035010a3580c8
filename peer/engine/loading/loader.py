"""From a checkpoint to blocks: only the tensors of the span, quantized as they arrive.

What quantizing made is kept on disk if there is a cache, and read from there the next time.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ....kernels.layers.routing import Router
from ....kernels.linear.nf4 import BYTES_PER_WEIGHT
from ....kernels.linear.quantize import ON_CPUS, WeightFormat
from ....models.checkpoints.checkpoint import Checkpoint, CheckpointError
from ....models.families.spec import ACTIVATIONS, ExpertsSpec, MlpKind, ModelShape, ModelSpec
from ....protocol.errors import ModelError, UsageError
from ....protocol.ids import make_model_id
from ....protocol.spans import Span
from ..blocks.attention import Attention
from ..blocks.attention_kernels import choose_kernels
from ..blocks.attention_options import AttentionOptions, QueryKeyTransform
from ..blocks.block import Block
from ..blocks.hosted_block import HostedBlock
from ..blocks.mlp import Experts, GatedMlp, Mlp, PlainMlp
from ..devices.device import CpuDevice, Numerics
from ..devices.device_names import NO_NF4
from .block_cache import BlockCache, name_entry
from .block_tensors import BlockTensors

ReportProgress = Callable[[int, int], None]

WEIGHT_BYTES = {
    WeightFormat.INT8: 1,
    WeightFormat.BF16: 2,
    WeightFormat.FP32: 4,
    WeightFormat.NF4: BYTES_PER_WEIGHT,
}


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a model directory or Hub id; whatever is wrong with it is a ModelError."""
    try:
        return Checkpoint.open(model, revision)
    except CheckpointError as error:
        raise ModelError(str(error)) from error


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

    Those that were `kept`, by index, are taken as they are.

    Needs memory for the result and less than one block in float32 on its way, whatever the size
    of the checkpoint. `cache` is used for int8 weights; the others are only copied.
    """
    check_span(spec, span)
    check_weights(spec, numerics)
    cache = cache if numerics.weights is WeightFormat.INT8 else None
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
        if cache is not None:
            return lambda index: _load_cached_block(checkpoint, spec, index, numerics, cache)
        return lambda index: load_block(checkpoint, spec, index, numerics)
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


def load_block(checkpoint: Checkpoint, spec: ModelSpec, index: int, numerics: Numerics) -> Block:
    """Load one block. A missing, misshapen or unusable tensor is a ModelError that names it."""
    tensors = BlockTensors(checkpoint, spec, index, numerics)
    return _build_block(tensors, spec, index, numerics)


def _load_cached_block(
    checkpoint: Checkpoint, spec: ModelSpec, index: int, numerics: Numerics, cache: BlockCache
) -> Block:
    """Load one block in int8; only what the cache does not have is quantized, and kept there."""
    name = name_entry(make_model_id(checkpoint.config, checkpoint.revision), index)
    max_bytes = count_block_bytes(spec, index, WeightFormat.INT8)
    known = cache.read(name, max_bytes=max_bytes)
    tensors = BlockTensors(checkpoint, spec, index, numerics, known)
    block = _build_block(tensors, spec, index, numerics)
    if tensors.quantized:
        cache.write(name, {**known, **tensors.quantized})
    return block


def count_block_bytes(spec: ModelSpec, index: int, weights: WeightFormat) -> int:
    """Return the bytes of a block's linears; in int8, each output has a float32 scale as well."""
    num_experts = spec.experts.num_experts if spec.experts is not None else 1
    weight_bytes = WEIGHT_BYTES[weights]
    scale_bytes = 4 if weights is WeightFormat.INT8 else 0
    return sum(
        int(shape[0] * shape[1] * weight_bytes + scale_bytes * shape[0])
        * (num_experts if "expert" in name else 1)
        for name, shape in spec.tensor_shapes(index).items()
        if len(shape) == 2
    )


def _build_block(tensors: BlockTensors, spec: ModelSpec, index: int, numerics: Numerics) -> Block:
    device = numerics.device
    options = AttentionOptions.of(spec, index, numerics.dtype, device.place)
    query_key_value = tensors.load_linear(("query", "key", "value"), spec.has_qkv_bias)
    output = tensors.load_linear(("output",), spec.has_output_bias)
    transform = QueryKeyTransform(options, _load_query_key_norm(tensors, spec))
    kernels = choose_kernels(index, options, transform, device.paged_attention)
    attention = Attention(index, options, query_key_value, output, transform, kernels)
    norms = {name: tensors.load_norm(name) for name in spec.norms}
    if spec.experts is not None and spec.has_experts(index):
        mlp = _load_experts(tensors, spec, spec.experts)
    else:
        mlp = _load_mlp(tensors, spec)
    return Block(spec.residual, norms, attention, mlp)


def _load_query_key_norm(tensors: BlockTensors, spec: ModelSpec) -> torch.Tensor | None:
    if not spec.has_qk_norm:
        return None
    query_D, key_D = (tensors.load_norm(name).weight_H for name in ("query_norm", "key_norm"))
    return torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])


def _load_mlp(tensors: BlockTensors, spec: ModelSpec, prefix: str = "", expert: int = 0) -> Mlp:
    """Load the MLP whose local names begin with `prefix`."""
    down = tensors.load_linear((f"{prefix}down",), spec.has_mlp_bias, expert)
    activation = ACTIVATIONS[spec.activation]
    if spec.mlp is MlpKind.PLAIN:
        up = tensors.load_linear((f"{prefix}up",), spec.has_mlp_bias, expert)
        return PlainMlp(up, down, activation)
    names = (f"{prefix}gate", f"{prefix}up")
    return GatedMlp(tensors.load_linear(names, spec.has_mlp_bias, expert), down, activation)


def _load_experts(tensors: BlockTensors, spec: ModelSpec, experts: ExpertsSpec) -> Experts:
    router = Router(tensors.load_router())
    mlps = [_load_mlp(tensors, spec, "expert_", expert) for expert in range(experts.num_experts)]
    return Experts(experts, router, mlps)
