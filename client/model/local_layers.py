"""The parts of a model that stay with the client, and checks of what goes into them.

These are embedding, final norm and head. Only their tensors are read from a checkpoint. Families
without a file in `models/families` use transformers' own modules, without blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...kernels.layers.norm import Norm, NormKind
from ...models.checkpoints.checkpoint import Checkpoint
from ...models.checkpoints.conversion import ConvertedCheckpoint
from ...models.checkpoints.hub import DEFAULT_HUB, Hub
from ...models.families.registry import find_family
from ...models.shells.shell_opening import open_shell, read_shape
from ...models.shells.step_cache import CACHE_NAME, StepCache
from ...models.specs.config_reader import DTYPES
from ...models.specs.model_spec import ModelSpec
from ...protocol.errors import ModelError, UsageError
from ...protocol.ids import make_model_id

# Shape suffixes: B rows, T tokens, H hidden size, V vocabulary.

IGNORED = -100
"""The label of a token that is not to be predicted, in torch and in transformers."""

_CHANGING_ROTATIONS = ("longrope", "dynamic")
"""Kinds of rope whose rotation of all tokens changes once a text is long."""

_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names that the command line and peers use."""

_OTHER_HEAD_NAMES = ("embed_out",)
"""Names of heads in checkpoints that differ from those in transformers (GPT-NeoX)."""

_TOKENS_AT_ONCE = 32
"""So many at a time have positions added: the decoder draws a mask of these times all before them,
for blocks that it does not have."""


Refusals = Mapping[str, tuple[tuple[object, ...], str]]
"""Arguments that cannot work: values that do no harm, and why."""

NOT_RETURNED: Refusals = {
    "output_attentions": ((None, False), "attention is computed on the peers and not returned"),
    "output_hidden_states": ((None, False), "hidden states between blocks are not returned"),
}

_OF_MODELS: Refusals = {
    **NOT_RETURNED,
    "head_mask": ((None,), "peers compute all heads"),
    "token_type_ids": ((None,), "the model has no types of tokens here"),
    "cache_position": ((None,), "positions follow from the session"),
}

_OF_CLIENTS = {
    "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id",
    "num_labels", "pad_token_id", "problem_type", "torch_dtype",
}  # fmt: skip
"""What a configuration says that peers do not compute with."""


class LocalNorm(nn.Module):
    """A norm with frozen weights: that between the last block and the head, for one."""

    def __init__(self, kind: NormKind, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(weight_H, requires_grad=False)
        self.bias = None if bias_H is None else nn.Parameter(bias_H, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the normalized hidden states in the dtype they came in."""
        return Norm(self.kind, self.weight, self.bias, self.eps)(hidden_BTH)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose vectors are multiplied by the root of their size."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled vectors, in the dtype of the weight."""
        # The scale is rounded to the weight's dtype: that is what the model was trained with.
        return super().forward(input) * torch.tensor(self.embedding_dim**0.5).to(self.weight)


class LearnedPositions(nn.Embedding):
    """Positions that are added to what the embedding returns."""

    def forward(self, hidden_BTH: Tensor, position: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return hidden states with the positions from `position` on, in the dtype given."""
        stop = position + hidden_BTH.shape[1]
        positions_T = torch.arange(position, stop, device=hidden_BTH.device)
        return hidden_BTH + super().forward(positions_T).to(hidden_BTH.dtype)


class LanguageHead(nn.Module):
    """Hidden states to logits; the weight may be the embedding's own.

    `softcap` bends logits into its open interval around zero.
    """

    bias = None
    """For TRL, which computes logits of some tokens from both."""

    def __init__(self, weight_VH: nn.Parameter, softcap: float | None = None) -> None:
        super().__init__()
        self.weight = weight_VH
        self.softcap = softcap

    def forward(self, hidden_BTH: Tensor, change_BTV: Tensor | None = None) -> Tensor:
        """Return float32 logits [B, T, V], multiplied in the dtype of the weight.

        `change_BTV` is what adapters add, before the logits are bent.
        """
        logits_BTV = F.linear(hidden_BTH.to(self.weight.dtype), self.weight).float()
        if change_BTV is not None:
            logits_BTV = logits_BTV + change_BTV
        if self.softcap is None:
            return logits_BTV
        return torch.tanh(logits_BTV / self.softcap) * self.softcap


class Multiplier(nn.Module):
    """Multiplies what the embedding returns, in families that do so (Granite)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the product, in the same dtype."""
        return hidden_BTH * self.factor


class WrappedPositions(nn.Module):
    """Adds positions as the family does: a decoder that has no blocks and no norm."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self._decoder = decoder

    def forward(self, hidden_BTH: Tensor, position: int) -> Tensor:
        """Return hidden states with the positions from `position` on."""
        parts_BTH = hidden_BTH.split(_TOKENS_AT_ONCE, dim=1)
        return torch.cat(
            [
                self._decoder(
                    inputs_embeds=part_BTH,
                    use_cache=True,
                    **{CACHE_NAME: StepCache(position + index * _TOKENS_AT_ONCE)},
                ).last_hidden_state
                for index, part_BTH in enumerate(parts_BTH)
            ],
            dim=1,
        )


class WrappedHead(nn.Module):
    """Hidden states behind the last block to logits, with everything that the family does there.

    Holds a whole causal language model that has no blocks.
    """

    def __init__(self, model: Any, decoder_name: str) -> None:
        super().__init__()
        self._model = model
        self._decoder_name = decoder_name

    @property
    def weight(self) -> Tensor:
        """The weight of the last linear."""
        return self._model.get_output_embeddings().weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the last linear."""
        return self._model.get_output_embeddings().bias

    def forward(self, hidden_BTH: Tensor, change_BTV: Tensor | None = None) -> Tensor:
        """Return float32 logits [B, T, V], multiplied in the dtype of the weight."""
        if change_BTV is not None:
            raise UsageError(
                f"adapters of the head are not applied in models of type "
                f"{self._model.config.model_type!r}"
            )
        hidden_N1H = self._set_apart(hidden_BTH)
        logits_N1V = self._model(inputs_embeds=hidden_N1H, use_cache=False).logits
        return logits_N1V.float().view(*hidden_BTH.shape[:2], -1)

    def normalize(self, hidden_BTH: Tensor) -> Tensor:
        """Return hidden states behind the final norm, in the dtype given."""
        hidden_N1H = self._set_apart(hidden_BTH)
        decoder = self._model.get_submodule(self._decoder_name)
        output_N1H = decoder(inputs_embeds=hidden_N1H, use_cache=False)[0]
        return output_N1H.to(hidden_BTH.dtype).view(hidden_BTH.shape)

    def _set_apart(self, hidden_BTH: Tensor) -> Tensor:
        """Return each token as a text: nothing here looks at others.

        Or the model would draw a mask of tokens times tokens for blocks that it does not have.
        """
        return hidden_BTH.to(self.weight.dtype).flatten(0, 1)[:, None]


class WrappedNorm(nn.Module):
    """The final norm of such a model alone."""

    def __init__(self, head: WrappedHead) -> None:
        super().__init__()
        self._head = head

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the normalized hidden states, in the dtype given."""
        return self._head.normalize(hidden_BTH)


@dataclass(frozen=True)
class LocalLayers:
    """The client's layers, ready to use and frozen; what a family lacks is None.

    Where the norm is transformers' own, it is a part of the head.
    """

    embedding: nn.Embedding
    embedding_norm: LocalNorm | Multiplier | None
    positions: LearnedPositions | WrappedPositions | None
    norm: LocalNorm | nn.Identity
    head: LanguageHead | WrappedHead

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the head, for models that have another head or none."""
        return WrappedNorm(self.head) if isinstance(self.head, WrappedHead) else self.norm

    def list_parameters(self) -> list[nn.Parameter]:
        """Return all weights, which are those of the model directory."""
        layers = (self.embedding, self.embedding_norm, self.positions, self.norm, self.head)
        return [value for layer in layers if layer is not None for value in layer.parameters()]


def open_checkpoint(
    model: str | Path,
    revision: str | None,
    hub: Hub = DEFAULT_HUB,
) -> tuple[Checkpoint, PreTrainedConfig]:
    """Open a model directory or Hub id; raises ModelError when it cannot be used.

    `dht_prefix` of the configuration is the model id in the directory: a digest of configuration
    and weights.
    """
    checkpoint = Checkpoint.open(model, revision, hub=hub)
    config = load_config(checkpoint)
    config.name_or_path = str(model)
    config.dht_prefix = make_model_id(checkpoint.config, checkpoint.revision)
    return checkpoint, config


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return transformers' configuration of the checkpoint, with the positions that peers serve.

    Raises ModelError, with the sentence of the peers, when they could not serve the model.
    """
    read_own = find_family(checkpoint.config)
    if read_own is None:
        shell = open_shell(checkpoint.config)
        config, shape = shell.config, read_shape(shell, checkpoint.config)
    else:
        shape = read_own(checkpoint.config)
        config = _read_config(checkpoint, shape.family)
    if getattr(config, "max_position_embeddings", None):
        config.max_position_embeddings = min(config.max_position_embeddings, shape.max_positions)
    # No attention and no experts run here, and a configuration must not choose code to be fetched.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _read_config(checkpoint: Checkpoint, model_type: str) -> PreTrainedConfig:
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
    except (
        StrictDataclassError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())
        raise ModelError(
            f"config.json in {checkpoint.directory} is damaged: {reason:.200}"
        ) from error


def resolve_dtype(requested: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a user asked for; None stands for the checkpoint's own.

    >>> resolve_dtype("auto"), resolve_dtype("bfloat16")
    (None, torch.bfloat16)
    """
    if requested is None or requested == "auto":
        return None
    name = str(requested).removeprefix("torch.")
    name = _SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"torch_dtype must be one of auto, {', '.join(DTYPES)}; got {requested}")
    return DTYPES[name]


def load_local_layers(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> LocalLayers:
    """Read the client's layers; `dtype` None keeps the embedding's stored dtype.

    A stored head is used even if the configuration says that it is tied, as transformers does.
    Raises ModelError that names the tensor which is missing, damaged or of a wrong shape.
    """
    read_spec = find_family(checkpoint.config)
    if read_spec is None:
        return _load_wrapped_layers(checkpoint, dtype)
    spec = read_spec(checkpoint.config)
    part, shape_VH = spec.client, (spec.vocab_size, spec.hidden_size)
    reader = _TensorReader(checkpoint, dtype)
    embedding_VH = reader.load(f"{part.embedding}.weight", shape_VH)
    reader = _TensorReader(checkpoint, embedding_VH.dtype)

    kind = ScaledEmbedding if part.scales_embedding else nn.Embedding
    embedding = kind.from_pretrained(embedding_VH, freeze=True)
    head_weight = cast(nn.Parameter, embedding.weight)
    if reader.has(f"{part.head}.weight"):
        head_VH = reader.load(f"{part.head}.weight", shape_VH)
        if not torch.equal(head_VH, embedding_VH):
            head_weight = nn.Parameter(head_VH, requires_grad=False)
    elif not spec.tie_word_embeddings:
        raise ModelError(
            f"the checkpoint in {checkpoint.directory} has no tensor {part.head + '.weight'!r} "
            "and its config.json does not tie it to the embedding"
        )
    positions = None
    if part.positions is not None:
        shape_PH = (spec.max_positions, spec.hidden_size)
        positions_PH = reader.load(f"{part.positions}.weight", shape_PH)
        positions = LearnedPositions.from_pretrained(positions_PH, freeze=True)
    embedding_norm = None
    if part.embedding_norm is not None:
        embedding_norm = _load_norm(reader, part.embedding_norm, spec)
    return LocalLayers(
        embedding,
        embedding_norm,
        positions,
        _load_norm(reader, part.norm, spec),
        LanguageHead(head_weight, part.logit_softcap),
    )


def _load_norm(reader: "_TensorReader", name: str, spec: ModelSpec) -> LocalNorm:
    shape = (spec.hidden_size,)
    weight_H = reader.load(f"{name}.weight", shape)
    if spec.norm_offset:
        # Stored without the offset because small weights keep more digits: so must their sum.
        weight_H = weight_H.float() + spec.norm_offset
    has_bias = spec.norm_kind is NormKind.LAYER
    bias_H = reader.load(f"{name}.bias", shape) if has_bias else None
    return LocalNorm(spec.norm_kind, weight_H, bias_H, spec.norm_eps)


class _TensorReader:
    """Loads tensors as copies of their own, so that they outlive the file."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # Checkpoints of the bare model, common for GPT-2 and BLOOM, leave the first word out.
        short_name = name.removeprefix("transformer.")
        name = name if self.has(name) or not self.has(short_name) else short_name
        tensor = self._checkpoint.load(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name!r} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        if tensor.dtype not in DTYPES.values():
            raise ModelError(f"tensor {name!r} is stored as {tensor.dtype}, which is not supported")
        return tensor.to(self._dtype or tensor.dtype, copy=True)


def _load_wrapped_layers(checkpoint: Checkpoint, dtype: torch.dtype | None) -> LocalLayers:
    """Read the layers of a family without a file here, as transformers' own modules."""
    shell = open_shell(checkpoint.config)
    converted = ConvertedCheckpoint(checkpoint, shell.model)
    model, decoder = shell.cut_model(), shell.decoder
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shell.load(converted, embedding, f"{_find_name(decoder, embedding)}.", dtype)
    dtype = embedding.weight.dtype
    for name in (shell.norm_name, shell.positions_name):
        if name is not None:
            shell.load(converted, decoder.get_submodule(name), f"{name}.", dtype)
    names = (_find_name(model, head), *_OTHER_HEAD_NAMES)
    head_name = next((name for name in names if converted.has(f"{name}.weight")), names[0])
    if shell.config.tie_word_embeddings and not converted.has(f"{head_name}.weight"):
        head.weight = embedding.weight
    else:
        shell.load(converted, head, f"{head_name}.", dtype)
    factor, positions = shell.embedding_multiplier, None
    if shell.positions_name is not None:
        positions = WrappedPositions(shell.cut([], has_positions=True))
    multiplier = None if factor == 1.0 else Multiplier(factor)
    wrapped_head = WrappedHead(model, shell.decoder_name)
    return LocalLayers(embedding, multiplier, positions, nn.Identity(), wrapped_head)


def _find_name(parent: nn.Module, child: nn.Module) -> str:
    return next(name for name, module in parent.named_modules() if module is child)


def check_token_ids(ids: object, vocab_size: int) -> Tensor:
    """Return token ids as int64 [B, T]; UsageError if they are anything else."""
    if not isinstance(ids, Tensor):
        raise UsageError(
            f"token ids must be a tensor, got {type(ids).__name__}; a tokenizer returns one "
            'with return_tensors="pt"'
        )
    if ids.ndim != 2 or ids.shape[0] == 0:
        raise UsageError(f"token ids must have the shape [rows, tokens], got {list(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"token ids must be whole numbers, got {ids.dtype}")
    lowest, highest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if lowest < 0 or highest >= vocab_size:
        raise UsageError(
            f"token ids must be from 0 to {vocab_size - 1}, got {lowest} to {highest}; does the "
            "tokenizer belong to this model?"
        )
    return ids.long()


def check_attention_mask(mask: Tensor | None) -> None:
    """Raise UsageError unless the mask attends to everything: peers know no padding."""
    if mask is not None and not isinstance(mask, Tensor):
        raise UsageError(f"the attention mask must be a tensor, got {type(mask).__name__}")
    if mask is not None and not bool((mask == 1).all()):
        raise UsageError(
            "the attention mask hides tokens, but remote blocks do not support padding; give "
            "prompts of different lengths one at a time, or grouped by length"
        )


def check_padding(mask_BT: Tensor | None, shape: Sequence[int]) -> None:
    """Raise UsageError unless a mask hides only the ends of rows.

    The end of a row changes nothing before it, so peers need no mask.
    """
    if mask_BT is None:
        return
    if not isinstance(mask_BT, Tensor) or tuple(mask_BT.shape) != tuple(shape):
        given = list(mask_BT.shape) if isinstance(mask_BT, Tensor) else type(mask_BT).__name__
        raise UsageError(
            f"the attention mask must have the shape of the inputs, {list(shape)}, not {given}"
        )
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise UsageError("the attention mask may only contain 0 and 1")
    if bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):
        raise UsageError(
            "the attention mask hides tokens on the left, which only generate() supports; pad on "
            "the right (tokenizer.padding_side = 'right') to call the model itself"
        )


def check_positions(num_tokens: int, model_config: PreTrainedConfig) -> None:
    """Raise UsageError for more tokens than the model has positions."""
    maximum = getattr(model_config, "max_position_embeddings", None)
    if maximum is not None and num_tokens > maximum:
        positions = describe_positions(model_config, maximum)
        raise UsageError(f"{num_tokens} tokens are too many: {positions}")


def describe_positions(model_config: PreTrainedConfig, max_positions: int) -> str:
    """Return how many positions a model has, and why that may be fewer than its card says."""
    rope = getattr(model_config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _CHANGING_ROTATIONS:
        return f"the model has {max_positions} positions"
    return (
        f"the model has {max_positions} positions here: beyond them its {rope['rope_type']} rope "
        "would change keys that are already cached, which shoal does not support"
    )


def override(config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Change a configuration as arguments of from_pretrained() say.

    Raises UsageError for what peers compute with, unless it stays what it is.
    """
    for name, value in changes.items():
        if name in _OF_CLIENTS:
            setattr(config, name, value)
        elif value != getattr(config, name):
            raise UsageError(
                f"{name} is {getattr(config, name)!r:.60} in the configuration that peers compute "
                f"with, and cannot be {value!r:.60}"
            )


def check_harmless(given: object, name: str, refusals: Refusals, called: str) -> None:
    """Raise UsageError for an argument of a call with a value that would change something."""
    harmless_values, reason = refusals[name]
    if isinstance(given, Tensor) or given not in harmless_values:
        raise UsageError(f"{called} does not take {name}: {reason}")


def check_others(
    others: Mapping[str, object], position: int, shape: Sequence[int], mask_BT: Tensor | None
) -> None:
    """Check what a model was called with beyond what it uses, for a text of `shape` [B, T].

    `position` is that of its first token. Raises UsageError for what would change something, and
    TypeError for unknown names.
    """
    for name, given in others.items():
        if name == "position_ids":
            _check_position_ids(given, position, shape, mask_BT)
        elif name in _OF_MODELS:
            check_harmless(given, name, _OF_MODELS, "the model")
        else:
            raise TypeError(f"the model got an unexpected keyword argument {name!r}")


def _check_position_ids(
    given: object, position: int, shape: Sequence[int], mask_BT: Tensor | None
) -> None:
    """Raise UsageError unless the positions of all tokens but padding are those they have."""
    if given is None:
        return
    num_tokens = shape[1]
    ours_T = torch.arange(position, position + num_tokens)
    if isinstance(given, Tensor) and given.shape in ((num_tokens,), (1, num_tokens), tuple(shape)):
        differs_BT = given.cpu() != ours_T
        # What is padded on the right has any position: nothing looks at it.
        if mask_BT is not None and mask_BT.shape == tuple(shape):
            differs_BT = differs_BT & (mask_BT.cpu() == 1)
        if not bool(differs_BT.any()):
            return
    raise UsageError(
        f"position_ids cannot change where tokens stand: these {num_tokens} have the positions "
        f"{position} to {position + num_tokens - 1}; leave position_ids out"
    )
