"""The parts of a model that stay with the client: embedding, final norm and head.

Reads these three tensors of a checkpoint and nothing else.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..kernels.checkpoint import Checkpoint, CheckpointError
from ..kernels.norm import rms_norm
from ..protocol.errors import ModelError, UsageError
from ..protocol.limits import MAX_BLOCKS, MAX_HIDDEN_SIZE

# Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.

MAX_VOCABULARY = 2**24
"""Far above any tokenizer; bounds what a damaged config.json can make us allocate."""


@dataclass(frozen=True)
class LocalTensorNames:
    """What a family calls the client's tensors in its checkpoints."""

    embedding: str
    norm: str
    head: str


_LLAMA_NAMES = LocalTensorNames("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

FAMILIES = {
    "llama": _LLAMA_NAMES,
    "mistral": _LLAMA_NAMES,
    "qwen2": _LLAMA_NAMES,
    "qwen3": _LLAMA_NAMES,
}
"""Supported values of `model_type`; each has a root mean square norm before its head."""

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class FinalNorm(nn.Module):
    """The norm between the last block and the head."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_H, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the normalized hidden states in the dtype they came in."""
        return rms_norm(hidden_BTH, self.weight, self.eps)


class LanguageHead(nn.Module):
    """Hidden states to logits; the weight may be the embedding's own."""

    def __init__(self, weight_VH: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VH

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return float32 logits [B, T, V], multiplied in the dtype of the weight."""
        return F.linear(hidden_BTH.to(self.weight.dtype), self.weight).float()


@dataclass(frozen=True)
class LocalLayers:
    """The client's layers, ready to use and frozen."""

    embedding: nn.Embedding
    norm: FinalNorm
    head: LanguageHead


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return transformers' configuration of the checkpoint; ModelError if it is not usable."""
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model_type!r} are not supported; supported are {', '.join(FAMILIES)}"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"config.json in {checkpoint.directory} is damaged: {error}") from error
    # No attention runs here, and a configuration must not choose code to be fetched.
    config._attn_implementation = "eager"
    for name, maximum in (
        ("hidden_size", MAX_HIDDEN_SIZE),
        ("num_hidden_layers", MAX_BLOCKS),
        ("vocab_size", MAX_VOCABULARY),
    ):
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise ModelError(
                f"{name} in config.json must be a number from 1 to {maximum}, got {value!r}"
            )
    return config


def resolve_dtype(requested: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a user asked for; None stands for the checkpoint's own.

    >>> resolve_dtype("auto"), resolve_dtype("bfloat16")
    (None, torch.bfloat16)
    """
    if requested is None or requested == "auto":
        return None
    name = str(requested).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"torch_dtype is one of auto, {', '.join(_DTYPES)}; got {requested}")
    return _DTYPES[name]


def load_local_layers(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype | None = None
) -> LocalLayers:
    """Read embedding, final norm and head; `dtype` None keeps the embedding's stored dtype.

    A stored head is used even if the configuration says that it is tied, as transformers does.
    Raises ModelError that names the tensor which is missing, damaged or of a wrong shape.
    """
    names = FAMILIES[config.model_type]
    vocab_size, hidden_size = cast(int, config.vocab_size), cast(int, config.hidden_size)

    embedding_VH = _load(checkpoint, names.embedding, (vocab_size, hidden_size), dtype)
    dtype = embedding_VH.dtype
    norm_H = _load(checkpoint, names.norm, (hidden_size,), dtype)
    embedding = nn.Embedding.from_pretrained(embedding_VH, freeze=True)
    head_weight = cast(nn.Parameter, embedding.weight)
    if checkpoint.has(names.head):
        head_VH = _load(checkpoint, names.head, (vocab_size, hidden_size), dtype)
        if not torch.equal(head_VH, embedding_VH):
            head_weight = nn.Parameter(head_VH, requires_grad=False)
    elif not config.tie_word_embeddings:
        raise ModelError(
            f"the checkpoint in {checkpoint.directory} has no tensor {names.head!r} and its "
            "config.json does not tie it to the embedding"
        )
    return LocalLayers(
        embedding, FinalNorm(norm_H, float(config.rms_norm_eps)), LanguageHead(head_weight)
    )


def _load(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Load one tensor as a copy of its own, so that it outlives the file."""
    try:
        tensor = checkpoint.load(name)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)}, config.json says {list(shape)}"
        )
    if tensor.dtype not in _DTYPES.values():
        raise ModelError(f"tensor {name!r} is stored as {tensor.dtype}, which is not supported")
    return tensor.to(dtype or tensor.dtype, copy=True)
