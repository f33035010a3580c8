"""The tensors of one block by their local names, however the checkpoint stores them."""

from collections.abc import Mapping, Sequence

import torch

from ....kernels.layers.norm import Norm
from ....kernels.linear.linear import Linear
from ....kernels.linear.nf4 import BYTES_PER_WEIGHT
from ....kernels.linear.quantize import (
    Int8Weight,
    WeightFormat,
    dequantize_int8,
    quantize_int8,
    stack_int8,
)
from ....kernels.linear.select import make_linear
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.checkpoints.quantized import read_quantization
from ....models.specs.model_spec import FusedOrder, ModelSpec
from ....protocol.errors import ModelError
from ..devices.device import Numerics

_LOADABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WEIGHT = "weight"

WEIGHT_BYTES = {
    WeightFormat.INT8: 1,
    WeightFormat.BF16: 2,
    WeightFormat.FP32: 4,
    WeightFormat.NF4: BYTES_PER_WEIGHT,
}


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


class BlockTensors:
    """Reads one block's tensors, checks them against the spec, and brings them to the device.

    `known` are int8 weights from a cache, by the names under which `quantized` collects what had
    to be quantized here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        index: int,
        numerics: Numerics,
        known: Mapping[str, Int8Weight] | None = None,
    ) -> None:
        self.quantized: dict[str, Int8Weight] = {}
        self._checkpoint = checkpoint
        self._quantization = read_quantization(checkpoint.config)
        self._spec = spec
        self._names = spec.tensors
        self._index = index
        self._weights = numerics.weights
        self._dtype = numerics.dtype
        self._torch_device = numerics.device.torch_device
        self._known = known or {}
        self._shapes: Mapping[str, tuple[int, ...]] = spec.tensor_shapes(index)

    def load_norm(self, local_name: str) -> Norm:
        """Return one norm, a copy of its own."""
        # With an offset the sum stays float32, as in transformers: small weights lose nothing.
        weight_H = self.load_floats((local_name,)).to(torch.float32) + self._spec.norm_offset
        if not self._spec.norm_offset:
            weight_H = weight_H.to(self._dtype)
        bias_name = f"{local_name}_bias"
        bias_H = None
        if bias_name in self._shapes:
            bias_H = self.load_floats((bias_name,)).to(self._dtype, copy=True)
        return Norm(self._spec.norm_kind, weight_H, bias_H, self._spec.norm_eps).to(
            self._torch_device
        )

    def load_router(self) -> torch.Tensor:
        """Return the weights that choose among experts."""
        return self.load_floats(("router",)).to(self._torch_device)

    def load_linear(self, local_names: Sequence[str], has_bias: bool, expert: int = 0) -> Linear:
        """Stack the weights of linears that share an input into one."""
        bias_O = None
        if has_bias:
            bias_O = self.load_floats([f"{name}_bias" for name in local_names], expert)
            bias_O = bias_O.to(self._torch_device)
        if self._weights is WeightFormat.INT8:
            weight_OI = self._load_int8(local_names, expert)
        else:
            weight_OI = self.load_floats(local_names, expert)
        try:
            return make_linear(weight_OI.to(self._torch_device), bias_O, self._weights, self._dtype)
        except ValueError as error:
            raise self._explain(local_names, expert, error) from error

    def load_floats(self, local_names: Sequence[str], expert: int = 0) -> torch.Tensor:
        """Return tensors of one input, stacked.

        The result has the stored dtype and may be a view of the file.
        """
        stored = self._list_stored(local_names)
        loaded = [self._load_one(name, shape, expert) for name, shape in stored.items()]
        tensors = [
            dequantize_int8(tensor) if isinstance(tensor, Int8Weight) else tensor
            for tensor in loaded
        ]
        stacked = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return _ungroup(stacked, self._spec) if self._is_grouped(stored) else stacked

    def _load_int8(self, local_names: Sequence[str], expert: int) -> Int8Weight:
        """Return linears of one input, stacked after each was quantized.

        Scales are per output: stacking before would be the same, and take more memory.
        """
        stored = self._list_stored(local_names)
        parts = [self._find_int8(name, shape, expert) for name, shape in stored.items()]
        stacked = stack_int8(parts)
        if self._is_grouped(stored):
            values_OI, scales_O = stacked.values_OI, stacked.scales_O
            return Int8Weight(_ungroup(values_OI, self._spec), _ungroup(scales_O, self._spec))
        return stacked

    def _find_int8(self, local_name: str, shape: tuple[int, ...], expert: int) -> Int8Weight:
        """Return one weight from the cache, as it is stored if that is int8, or quantize it."""
        name = f"{local_name}.{expert}"
        known = self._known.get(name)
        if known is not None and tuple(known.shape) == shape:
            return known
        weight_OI = self._load_one(local_name, shape, expert)
        if isinstance(weight_OI, Int8Weight):
            return weight_OI
        try:
            self.quantized[name] = quantize_int8(weight_OI)
        except ValueError as error:
            raise self._explain([local_name], expert, error) from error
        return self.quantized[name]

    def _list_stored(self, local_names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that hold these, one if they are fused."""
        shapes = {name: self._shapes[name] for name in local_names}
        fused_name = "_".join(name.removesuffix("_bias") for name in local_names)
        if local_names[0].endswith("_bias"):
            fused_name += "_bias"
        if len(local_names) == 1 or fused_name not in self._names.names:
            return shapes
        num_outputs = sum(shape[0] for shape in shapes.values())
        return {fused_name: (num_outputs, *shapes[local_names[0]][1:])}

    def _is_grouped(self, stored: Mapping[str, tuple[int, ...]]) -> bool:
        is_fused = not stored.keys() <= self._shapes.keys()
        return is_fused and self._names.fused_order is FusedOrder.BY_GROUP

    def _load_one(
        self, local_name: str, shape: tuple[int, ...], expert: int
    ) -> torch.Tensor | Int8Weight:
        name = self._find(local_name, expert)
        if len(shape) == 2 and self._quantization is not None:
            stem = name.removesuffix(_WEIGHT)
            if self._quantization.stores(self._checkpoint, stem):
                return self._quantization.load(self._checkpoint, stem, (shape[0], shape[1]))
        tensor = self._checkpoint.load(name)
        if tensor.dim() == 2 and self._names.stores_transposed:
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
        usual, *others = self._names.list_stored(self._index, local_name, expert)
        if not others or self._is_stored(usual):
            return usual
        return next(filter(self._is_stored, others), usual)

    def _is_stored(self, name: str) -> bool:
        if self._checkpoint.has(name) or self._quantization is None:
            return self._checkpoint.has(name)
        return self._quantization.stores(self._checkpoint, name.removesuffix(_WEIGHT))

    def _explain(self, local_names: Sequence[str], expert: int, error: ValueError) -> ModelError:
        stored = self._list_stored(local_names) if local_names[0] in self._shapes else local_names
        names = ", ".join(self._find(name, expert) for name in stored)
        return ModelError(f"tensor {names} cannot be used: {error}")


def _ungroup(fused: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorder outputs from BY_GROUP to STACKED (X: queries of a group, its key and its value)."""
    grouped_GXD = fused.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
    parts = grouped_GXD[:, :-2], grouped_GXD[:, -2], grouped_GXD[:, -1]
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])
