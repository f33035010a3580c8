"""The spec of a model: its blocks in checked numbers, and the names of its stored tensors.

A file of `models/families` makes a ModelSpec of each `config.json` of its family. Peers build
blocks from it, clients their embedding, norm and head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from ...kernels.layers.activations import ACTIVATIONS
from ...kernels.layers.norm import NormKind
from ...protocol.errors import ModelError


class Residual(Enum):
    """The input of the MLP of a block, and the order of its additions."""

    SEQUENTIAL = "sequential"
    """Attention is added to the hidden states; the MLP reads and is added to their sum."""

    PARALLEL = "parallel"
    """Attention and MLP read the same hidden states, and both are added to them.

    An MLP without a norm of its own reads what attention reads."""


class MlpKind(Enum):
    """The kind of an MLP: plain, or gated."""

    GATED = "gated"
    """activation(gate) * up"""

    PLAIN = "plain"
    """activation(up)"""


class FusedOrder(Enum):
    """The order of the outputs of one stored linear for queries, keys and values."""

    STACKED = "stacked"
    """All queries, then all keys, then all values."""

    BY_GROUP = "by group"
    """For each key-value head: its queries, its key, its value."""


LLAMA_TENSOR_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key": "self_attn.k_proj.weight",
    "key_bias": "self_attn.k_proj.bias",
    "key_norm": "self_attn.k_norm.weight",
    "value": "self_attn.v_proj.weight",
    "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up": "mlp.up_proj.weight",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
}
"""The names of a block's tensors in Llama and most families after it; few have all of them."""


@dataclass(frozen=True, kw_only=True)
class BlockTensorNames:
    """The names of a block's tensors in checkpoints of a family, and how they are stored.

    `names` maps block-local names to names below `prefixes`, where `{block}` is the index of the
    block and `{expert}` that of an expert. Linears that are stored as one have their local names
    joined: "query_key_value", "gate_up". Where checkpoints differ, there are several prefixes or
    names. Conv1D layers store their weights transposed. The defaults are Llama's.
    """

    prefixes: tuple[str, ...] = ("model.layers.{block}.",)
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=lambda: LLAMA_TENSOR_NAMES)
    fused_order: FusedOrder = FusedOrder.STACKED
    stores_transposed: bool = False

    def list_stored(self, block: int, local_name: str, expert: int = 0) -> list[str]:
        """Return the possible stored names of a block-local tensor, the usual one first."""
        names = self.names[local_name]
        return [
            (prefix + name).format(block=block, expert=expert)
            for prefix in self.prefixes
            for name in ([names] if isinstance(names, str) else names)
        ]


@dataclass(frozen=True, kw_only=True)
class ClientPart:
    """The layers before the first block and after the last one, which clients compute.

    All names are those of modules in checkpoints; the defaults are Llama's. `embedding_norm`
    normalizes the output of the embedding, `positions` are added to it, and `scales_embedding`
    multiplies it by the root of the hidden size. `norm` is of the same kind as those in blocks.
    `logit_softcap` bends logits into its open interval around zero.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    positions: str | None = None
    scales_embedding: bool = False
    norm: str = "model.norm"
    head: str = "lm_head"
    logit_softcap: float | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP, in every block but `dense_blocks`.

    Each row is computed by the `num_chosen` experts that the router scores highest. Their shares
    in the result are the router's probabilities; with `is_normalized` these add up to one.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_normalized: bool
    dense_blocks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class AlibiSpec:
    """Linear biases instead of rotations; the fields are those of `kernels/attention/alibi.py`."""

    scale: float = 1.0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of any model that the engine needs, whether its blocks are ours or wrapped.

    `dtype` is the one that the weights were published in.
    """

    family: str
    hidden_size: int
    num_blocks: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    dtype: torch.dtype

    @property
    def ropes(self) -> tuple[Mapping[str, object], ...]:
        """The rotations of this model that need a table of ours."""
        return ()


@dataclass(frozen=True, kw_only=True)
class WrappedShape(ModelShape):
    """The shape of a model that runs through transformers, with the numbers that each block has.

    Its `num_kv_heads` and `head_dim` are those of the KV cache, which may keep another form of what
    its `num_heads` compute.
    """

    num_heads: int
    block_parameters: tuple[int, ...]
    block_table_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelShape):
    """The shape of a model whose family has a file here: enough to build any of its blocks.

    `norms` names the norms of a block: "attention_norm" and "mlp_norm" normalize the input of the
    two halves, "attention_output_norm" and "mlp_output_norm" what is added; `norm_offset` is added
    to the stored weights of all. `sliding_windows` has one entry per block, None for full
    attention. `rope_parameters` follow transformers 5 and are None without rotations; blocks with
    a window rotate by `local_rope_parameters` if there are any. `attention_scale` None stands for
    the root of the head size. `tensors` names the stored tensors of blocks, `client` describes the
    layers of clients.
    """

    num_heads: int
    intermediate_size: int
    norm_eps: float
    rope_parameters: Mapping[str, object] | None
    vocab_size: int
    tie_word_embeddings: bool
    activation: str
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    norm_kind: NormKind = NormKind.RMS
    norm_offset: float = 0.0
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")
    residual: Residual = Residual.SEQUENTIAL
    mlp: MlpKind = MlpKind.GATED
    experts: ExpertsSpec | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    alibi: AlibiSpec | None = None
    local_rope_parameters: Mapping[str, object] | None = None
    tensors: BlockTensorNames = BlockTensorNames()
    client: ClientPart = ClientPart()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly"
            )
        if self.rope_parameters is not None and self.head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"config.json: activation {self.activation!r} is not supported; "
                f"supported are {', '.join(ACTIVATIONS)}"
            )
        if len(self.sliding_windows) != self.num_blocks:
            raise ModelError(
                f"config.json: {len(self.sliding_windows)} layer types for {self.num_blocks} blocks"
            )
        if self.experts is not None and self.experts.num_chosen > self.experts.num_experts:
            raise ModelError(
                f"config.json: {self.experts.num_chosen} of {self.experts.num_experts} experts "
                "cannot be chosen"
            )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def ropes(self) -> tuple[Mapping[str, object], ...]:
        """The rotations of this model, each with a table of its own."""
        ropes = (self.rope_parameters, self.local_rope_parameters)
        return tuple(rope for rope in ropes if rope is not None)

    def find_rope(self, block: int) -> int | None:
        """Return which of the `ropes` a block uses, or None if it does not rotate."""
        if self.rope_parameters is None:
            return None
        is_local = self.sliding_windows[block] is not None and len(self.ropes) > 1
        return 1 if is_local else 0

    def has_experts(self, block: int) -> bool:
        """Return whether a block has a mixture of experts in place of an MLP."""
        return self.experts is not None and block not in self.experts.dense_blocks

    def tensor_shapes(self, block: int = 0) -> dict[str, tuple[int, ...]]:
        """Return the block-local names of a block's tensors with the shapes they must have.

        Those of experts stand for the tensor of any one expert.
        """
        shapes = self._attention_shapes()
        for name in self.norms:
            shapes[name] = (self.hidden_size,)
            if self.norm_kind is NormKind.LAYER:
                shapes[f"{name}_bias"] = (self.hidden_size,)
        if self.experts is not None and self.has_experts(block):
            shapes["router"] = (self.experts.num_experts, self.hidden_size)
            return shapes | self._mlp_shapes("expert_", self.experts.intermediate_size)
        return shapes | self._mlp_shapes("", self.intermediate_size)

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden_size, self.query_size, self.kv_size
        shapes: dict[str, tuple[int, ...]] = {
            "query": (query, hidden),
            "key": (kv, hidden),
            "value": (kv, hidden),
            "output": (hidden, query),
        }
        if self.has_qkv_bias:
            shapes |= {"query_bias": (query,), "key_bias": (kv,), "value_bias": (kv,)}
        if self.has_output_bias:
            shapes |= {"output_bias": (hidden,)}
        if self.has_qk_norm:
            shapes |= {"query_norm": (self.head_dim,), "key_norm": (self.head_dim,)}
        return shapes

    def _mlp_shapes(self, prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}up": (inner, hidden),
            f"{prefix}down": (hidden, inner),
        }
        if self.has_mlp_bias:
            shapes |= {f"{prefix}up_bias": (inner,), f"{prefix}down_bias": (hidden,)}
        if self.mlp is MlpKind.GATED:
            shapes |= {f"{prefix}gate": (inner, hidden)}
            if self.has_mlp_bias:
                shapes |= {f"{prefix}gate_bias": (inner,)}
        return shapes
