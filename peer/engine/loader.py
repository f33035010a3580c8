"""From a checkpoint to blocks: only the tensors of the span, quantized as they arrive."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kernels.checkpoint import Checkpoint, CheckpointError
from ...kernels.linear import Linear, make_linear
from ...kernels.norm import Norm
from ...kernels.quantize import WeightFormat
from ...kernels.routing import Router
from ...protocol.errors import ModelError, UsageError
from ...protocol.spans import Span
from .attention import Attention, AttentionOptions
from .block import Block
from .families import find_family
from .families.family import FusedOrder
from .mlp import Experts, GatedMlp, Mlp, PlainMlp
from .spec import ACTIVATIONS, ExpertsSpec, MlpKind, ModelShape, ModelSpec

if TYPE_CHECKING:
    from .wrapped import WrappedBlock

_LOADABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

ReportProgress = Callable[[int, int], None]


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
    weights: WeightFormat,
    dtype: torch.dtype,
    on_progress: ReportProgress | None = None,
) -> Sequence["Block | WrappedBlock"]:
    """Load the blocks of a span in order; `on_progress(done, total)` counts blocks.

    Needs memory for the result and one tensor on its way, whatever the size of the checkpoint.
    """
    check_span(spec, span)
    check_weights(spec, weights)
    load = _choose_loader(checkpoint, spec, weights, dtype)
    blocks: list[Block | WrappedBlock] = []
    for index in range(span.start, span.stop):
        blocks.append(load(index))
        if on_progress is not None:
            on_progress(len(blocks), len(span))
    return blocks


def _choose_loader(
    checkpoint: Checkpoint, spec: ModelShape, weights: WeightFormat, dtype: torch.dtype
) -> Callable[[int], "Block | WrappedBlock"]:
    if isinstance(spec, ModelSpec):
        return lambda index: load_block(checkpoint, spec, index, weights, dtype)
    from .wrapped import WrappedLoader  # transformers takes seconds to import

    return WrappedLoader(checkpoint, dtype).load


def check_span(spec: ModelShape, span: Span) -> None:
    """Raise UsageError if the model has no such blocks."""
    if span.stop > spec.num_blocks:
        raise UsageError(
            f"the model has blocks 0:{spec.num_blocks}, the span {span} reaches beyond them"
        )


def check_weights(spec: ModelShape, weights: WeightFormat) -> None:
    """Raise UsageError if the model's blocks cannot hold their weights in this format."""
    if weights is WeightFormat.INT8 and not isinstance(spec, ModelSpec):
        raise UsageError(
            f"models of type {spec.family!r} run through transformers, which needs float weights; "
            "use --weights bf16 or fp32"
        )


def load_block(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    index: int,
    weights: WeightFormat,
    dtype: torch.dtype,
) -> Block:
    """Load one block; `dtype` is that of its activations.

    A missing, misshapen or unusable tensor is a ModelError that names it.
    """
    tensors = _BlockTensors(checkpoint, spec, index, weights, dtype)
    attention = Attention(
        index,
        AttentionOptions.of(spec, index, dtype),
        query_key_value=tensors.load_linear(("query", "key", "value"), spec.has_qkv_bias),
        output=tensors.load_linear(("output",), spec.has_output_bias),
        query_key_norm_JD=_load_query_key_norm(tensors, spec),
    )
    norms = {name: tensors.load_norm(name) for name in spec.norms}
    if spec.experts is not None and spec.has_experts(index):
        mlp = _load_experts(tensors, spec, spec.experts)
    else:
        mlp = _load_mlp(tensors, spec)
    return Block(spec.residual, norms, attention, mlp)


def _load_query_key_norm(tensors: "_BlockTensors", spec: ModelSpec) -> torch.Tensor | None:
    if not spec.has_qk_norm:
        return None
    query_D, key_D = (tensors.load_norm(name).weight_H for name in ("query_norm", "key_norm"))
    return torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])


def _load_mlp(tensors: "_BlockTensors", spec: ModelSpec, prefix: str = "", expert: int = 0) -> Mlp:
    """Load the MLP whose local names begin with `prefix`."""
    down = tensors.load_linear((f"{prefix}down",), spec.has_mlp_bias, expert)
    activation = ACTIVATIONS[spec.activation]
    if spec.mlp is MlpKind.PLAIN:
        up = tensors.load_linear((f"{prefix}up",), spec.has_mlp_bias, expert)
        return PlainMlp(up, down, activation)
    names = (f"{prefix}gate", f"{prefix}up")
    return GatedMlp(tensors.load_linear(names, spec.has_mlp_bias, expert), down, activation)


def _load_experts(tensors: "_BlockTensors", spec: ModelSpec, experts: ExpertsSpec) -> Experts:
    router = Router(tensors.load(("router",)))
    mlps = [_load_mlp(tensors, spec, "expert_", expert) for expert in range(experts.num_experts)]
    return Experts(experts, router, mlps)


class _BlockTensors:
    """The tensors of one block by their local names, checked against the spec."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        index: int,
        weights: WeightFormat,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        family = find_family(checkpoint.config)
        assert family is not None  # otherwise there would be no ModelSpec
        self._family = family
        self._spec = spec
        self._index = index
        self._weights = weights
        self._dtype = dtype
        self._shapes: Mapping[str, tuple[int, ...]] = spec.tensor_shapes(index)

    def load(self, local_names: Sequence[str], suffix: str = "", expert: int = 0) -> torch.Tensor:
        """Return tensors of one input, stacked, however the checkpoint stores them.

        The result has the stored dtype and may be a view of the file.
        """
        shapes = [self._shapes[name + suffix] for name in local_names]
        fused_name = "_".join(local_names) + suffix
        if len(local_names) > 1 and fused_name in self._family.tensor_names:
            num_outputs = sum(shape[0] for shape in shapes)
            fused = self._load_one(fused_name, (num_outputs, *shapes[0][1:]), expert)
            if self._family.fused_order is FusedOrder.BY_GROUP:
                return _ungroup(fused, self._spec)
            return fused
        tensors = [
            self._load_one(name + suffix, shape, expert)
            for name, shape in zip(local_names, shapes, strict=True)
        ]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _load_one(self, local_name: str, shape: tuple[int, ...], expert: int) -> torch.Tensor:
        name = self._find(local_name, expert)
        try:
            tensor = self._checkpoint.load(name)
        except CheckpointError as error:
            raise ModelError(str(error)) from error
        if tensor.dim() == 2 and self._family.stores_transposed:
            tensor = tensor.t()
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
            )
        if tensor.dtype not in _LOADABLE_DTYPES:
            raise ModelError(
                f"tensor {name} is stored as {tensor.dtype}; use a checkpoint with float weights"
            )
        return tensor

    def _find(self, local_name: str, expert: int = 0) -> str:
        usual, *others = self._family.checkpoint_names(self._index, local_name, expert)
        if not others or self._checkpoint.has(usual):
            return usual
        return next(filter(self._checkpoint.has, others), usual)

    def load_norm(self, local_name: str) -> Norm:
        """Return one norm, a copy of its own."""
        # Added before the weight is rounded to 16 bits: small weights lose nothing.
        weight_H = self.load((local_name,)).to(torch.float32) + self._spec.norm_offset
        bias_name = f"{local_name}_bias"
        bias_H = None
        if bias_name in self._shapes:
            bias_H = self.load((bias_name,)).to(self._dtype, copy=True)
        return Norm(self._spec.norm_kind, weight_H.to(self._dtype), bias_H, self._spec.norm_eps)

    def load_linear(self, local_names: Sequence[str], has_bias: bool, expert: int = 0) -> Linear:
        """Stack the weights of linears that share an input into one.

        Scales are per output channel, so stacking before or after quantizing is the same.
        """
        bias_O = self.load(local_names, "_bias", expert) if has_bias else None
        weight_OI = self.load(local_names, expert=expert)
        try:
            return make_linear(weight_OI, bias_O, self._weights, self._dtype)
        except ValueError as error:
            fused_name = "_".join(local_names)
            stored = [fused_name] if fused_name in self._family.tensor_names else local_names
            names = ", ".join(self._find(name, expert) for name in stored)
            raise ModelError(f"tensor {names} cannot be used: {error}") from error


def _ungroup(fused: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorder outputs from BY_GROUP to STACKED (X: queries of a group, its key and its value)."""
    grouped_GXD = fused.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
    parts = grouped_GXD[:, :-2], grouped_GXD[:, -2], grouped_GXD[:, -1]
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])
