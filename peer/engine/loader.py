"""From a checkpoint to blocks: only the tensors of the span, quantized as they arrive."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ...kernels.checkpoint import Checkpoint, CheckpointError
from ...kernels.linear import Linear, make_linear
from ...kernels.quantize import WeightFormat
from ...protocol.errors import ModelError, UsageError
from ...protocol.spans import Span
from .block import Block, BlockWeights
from .families import find_family
from .spec import ModelSpec

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
    spec: ModelSpec,
    span: Span,
    weights: WeightFormat,
    dtype: torch.dtype,
    on_progress: ReportProgress | None = None,
) -> list[Block]:
    """Load the blocks of a span in order; `on_progress(done, total)` counts blocks.

    Needs memory for the result and one tensor on its way, whatever the size of the checkpoint.
    """
    check_span(spec, span)
    blocks: list[Block] = []
    for index in range(span.start, span.stop):
        blocks.append(load_block(checkpoint, spec, index, weights, dtype))
        if on_progress is not None:
            on_progress(len(blocks), len(span))
    return blocks


def check_span(spec: ModelSpec, span: Span) -> None:
    """Raise UsageError if the model has no such blocks."""
    if span.stop > spec.num_blocks:
        raise UsageError(
            f"the model has blocks 0:{spec.num_blocks}, the span {span} reaches beyond them"
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
    tensors = _BlockTensors(checkpoint, spec, index)

    def load_linear(local_names: Sequence[str], has_bias: bool) -> Linear:
        return tensors.load_linear(local_names, has_bias, weights, dtype)

    return Block(
        spec,
        index,
        BlockWeights(
            attention_norm_H=tensors.load("attention_norm").to(dtype, copy=True),
            mlp_norm_H=tensors.load("mlp_norm").to(dtype, copy=True),
            query_key_value=load_linear(("query", "key", "value"), spec.has_qkv_bias),
            output=load_linear(("output",), spec.has_output_bias),
            gate_up=load_linear(("gate", "up"), spec.has_mlp_bias),
            down=load_linear(("down",), spec.has_mlp_bias),
            query_key_norm_JD=_load_query_key_norm(tensors, spec, dtype),
        ),
    )


def _load_query_key_norm(
    tensors: "_BlockTensors", spec: ModelSpec, dtype: torch.dtype
) -> torch.Tensor | None:
    if not spec.has_qk_norm:
        return None
    query_D, key_D = tensors.load("query_norm"), tensors.load("key_norm")
    norm_JD = torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])
    return norm_JD.to(dtype)


class _BlockTensors:
    """The tensors of one block by their local names, checked against the spec."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, index: int) -> None:
        self._checkpoint = checkpoint
        self._family = find_family(checkpoint.config)
        self._index = index
        self._shapes: Mapping[str, tuple[int, ...]] = spec.tensor_shapes()

    def load(self, local_name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype; it may be a view of the file."""
        name = self._family.checkpoint_name(self._index, local_name)
        try:
            tensor = self._checkpoint.load(name)
        except CheckpointError as error:
            raise ModelError(str(error)) from error
        expected = self._shapes[local_name]
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json makes it {expected}"
            )
        if tensor.dtype not in _LOADABLE_DTYPES:
            raise ModelError(
                f"tensor {name} is stored as {tensor.dtype}; use a checkpoint with float weights"
            )
        return tensor

    def load_linear(
        self,
        local_names: Sequence[str],
        has_bias: bool,
        weights: WeightFormat,
        dtype: torch.dtype,
    ) -> Linear:
        """Stack the weights of linears that share an input into one.

        Scales are per output channel, so stacking before or after quantizing is the same.
        """
        bias_O = (
            torch.cat([self.load(f"{name}_bias") for name in local_names]) if has_bias else None
        )
        weight_OI = torch.cat([self.load(name) for name in local_names])
        try:
            return make_linear(weight_OI, bias_O, weights, dtype)
        except ValueError as error:
            names = ", ".join(self._family.checkpoint_name(self._index, n) for n in local_names)
            raise ModelError(f"tensor {names} cannot be used: {error}") from error
