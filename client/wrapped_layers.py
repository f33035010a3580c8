"""The client's layers of families without an entry here: transformers' own, without blocks."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.checkpoint import Checkpoint, CheckpointError
from ..kernels.conversion import ConvertedCheckpoint
from ..kernels.shell import Shell, ShellError, open_shell
from ..protocol.errors import ModelError, UsageError

_OTHER_HEAD_NAMES = ("embed_out",)
"""What checkpoints call a head that is called otherwise in transformers (GPT-NeoX)."""


class Multiplier(nn.Module):
    """Multiplies what the embedding returns, in families that do so (Granite)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        """Return the product, in the same dtype."""
        return hidden_BTH * self.factor


class WrappedHead(nn.Module):
    """Hidden states behind the last block to logits, with everything that the family does there.

    Holds a whole causal language model that has no blocks.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    @property
    def weight(self) -> Tensor:
        """The weight of the last linear."""
        return self._model.get_output_embeddings().weight

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
        output_N1H = self._model.base_model(inputs_embeds=hidden_N1H, use_cache=False)[0]
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


def open_checkpoint_shell(checkpoint: Checkpoint) -> Shell:
    """Return the shell of a checkpoint's model; a ModelError says why there is none."""
    try:
        return open_shell(checkpoint.config)
    except ShellError as error:
        raise ModelError(str(error)) from error


def load_wrapped_layers(
    checkpoint: Checkpoint, dtype: torch.dtype | None
) -> tuple[nn.Embedding, Multiplier | None, WrappedHead]:
    """Read embedding, what follows it and head; `dtype` None keeps the embedding's stored dtype."""
    shell = open_checkpoint_shell(checkpoint)
    model = copy.copy(shell.model)
    model._modules = dict(shell.model._modules)
    setattr(model, model.base_model_prefix, shell.cut([], has_norm=True))
    try:
        tensors = ConvertedCheckpoint(checkpoint, shell.model)
        embedding, head = _load(shell, model, tensors, dtype)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    factor = shell.embedding_multiplier
    return embedding, None if factor == 1.0 else Multiplier(factor), head


def _load(
    shell: Shell, model: Any, checkpoint: ConvertedCheckpoint, dtype: torch.dtype | None
) -> tuple[nn.Embedding, WrappedHead]:
    decoder = model.base_model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shell.load(checkpoint, embedding, f"{_find_name(decoder, embedding)}.", dtype)
    dtype = embedding.weight.dtype
    shell.load(checkpoint, getattr(decoder, shell.norm_name), f"{shell.norm_name}.", dtype)
    names = (_find_name(model, head), *_OTHER_HEAD_NAMES)
    head_name = next((name for name in names if checkpoint.has(f"{name}.weight")), names[0])
    if shell.config.tie_word_embeddings and not checkpoint.has(f"{head_name}.weight"):
        head.weight = embedding.weight
    else:
        shell.load(checkpoint, head, f"{head_name}.", dtype)
    return embedding, WrappedHead(model)


def _find_name(parent: nn.Module, child: nn.Module) -> str:
    return next(name for name, module in parent.named_modules() if module is child)
