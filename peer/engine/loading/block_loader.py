"""One block of ours, built of the tensors in a checkpoint and of those in the cache on disk."""

import torch

from ....kernels.layers.activations import ACTIVATIONS
from ....kernels.layers.expert_routing import Router
from ....kernels.layers.row_kernels import RowKernels
from ....kernels.linear.quantize import WeightFormat
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.specs.model_spec import ExpertsSpec, MlpKind, ModelSpec
from ....protocol.ids import make_model_id
from ..blocks.attention import Attention
from ..blocks.attention_kernels import choose_kernels
from ..blocks.attention_options import AttentionOptions, QueryKeyTransform
from ..blocks.block import Block, Experts, GatedMlp, Mlp, PlainMlp
from ..devices.device import Numerics
from .block_cache import BlockCache, name_entry
from .block_tensors import BlockTensors, count_block_bytes


def load_block(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    index: int,
    numerics: Numerics,
    cache: BlockCache | None = None,
) -> Block:
    """Load one block. A missing, misshapen or unusable tensor is a ModelError that names it.

    With a cache and int8 weights, only what the cache does not have is quantized, and kept there.
    """
    if cache is None or numerics.weights is not WeightFormat.INT8:
        return _build_block(BlockTensors(checkpoint, spec, index, numerics), spec, index, numerics)
    name = name_entry(make_model_id(checkpoint.config, checkpoint.revision), index)
    known = cache.read(name, max_bytes=count_block_bytes(spec, index, WeightFormat.INT8))
    tensors = BlockTensors(checkpoint, spec, index, numerics, known)
    block = _build_block(tensors, spec, index, numerics)
    if tensors.quantized:
        cache.write(name, {**known, **tensors.quantized})
    return block


def _build_block(tensors: BlockTensors, spec: ModelSpec, index: int, numerics: Numerics) -> Block:
    device = numerics.device
    options = AttentionOptions.of(spec, index, numerics.dtype, device.torch_device)
    query_key_value = tensors.load_linear(("query", "key", "value"), spec.has_qkv_bias)
    output = tensors.load_linear(("output",), spec.has_output_bias)
    transform = QueryKeyTransform(options, _load_query_key_norm(tensors, spec))
    kernels = choose_kernels(index, options, transform, device.paged_attention)
    attention = Attention(index, options, query_key_value, output, transform, kernels)
    norms = {name: tensors.load_norm(name) for name in spec.norms}
    row_kernels = numerics.row_kernels
    if spec.experts is not None and spec.has_experts(index):
        mlp = _load_experts(tensors, spec, spec.experts)
    else:
        mlp = _load_mlp(tensors, spec, row_kernels)
    return Block(spec.residual, norms, attention, mlp, row_kernels)


def _load_query_key_norm(tensors: BlockTensors, spec: ModelSpec) -> torch.Tensor | None:
    if not spec.has_qk_norm:
        return None
    query_D, key_D = (tensors.load_norm(name).weight_H for name in ("query_norm", "key_norm"))
    return torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])


def _load_mlp(
    tensors: BlockTensors,
    spec: ModelSpec,
    row_kernels: RowKernels | None,
    prefix: str = "",
    expert: int = 0,
) -> Mlp:
    """Load the MLP whose local names begin with `prefix`."""
    down = tensors.load_linear((f"{prefix}down",), spec.has_mlp_bias, expert)
    activation = ACTIVATIONS[spec.activation]
    if spec.mlp is MlpKind.PLAIN:
        up = tensors.load_linear((f"{prefix}up",), spec.has_mlp_bias, expert)
        return PlainMlp(up, down, activation)
    names = (f"{prefix}gate", f"{prefix}up")
    gate_up = tensors.load_linear(names, spec.has_mlp_bias, expert)
    return GatedMlp(gate_up, down, activation, row_kernels)


def _load_experts(tensors: BlockTensors, spec: ModelSpec, experts: ExpertsSpec) -> Experts:
    router = Router(tensors.load_router())
    mlps = [
        _load_mlp(tensors, spec, None, "expert_", expert) for expert in range(experts.num_experts)
    ]
    return Experts(experts, router, mlps)
