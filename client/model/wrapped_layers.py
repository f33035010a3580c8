"""The client's layers of families without a file here: transformers' own, without blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.checkpoints.checkpoint import Checkpoint
from ...models.checkpoints.conversion import ConvertedCheckpoint
from ...models.shells.shell_opening import open_shell
from ...models.shells.step_cache import StepCache
from ...protocol.errors import UsageError

_OTHER_HEAD_NAMES = ("embed_out",)
"""What checkpoints call a head that is called otherwise in transformers (GPT-NeoX)."""

_TOKENS_AT_ONCE = 32
"""So many at a time have positions added: the decoder draws a mask of these times all before them,
for blocks that it does not have."""


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
                    past_key_values=StepCache(position + index * _TOKENS_AT_ONCE),
                    use_cache=True,
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
class WrappedLayers:
    """The client's layers of such a model; what its family lacks is None."""

    embedding: nn.Embedding
    multiplier: Multiplier | None
    positions: WrappedPositions | None
    head: WrappedHead


def load_wrapped_layers(checkpoint: Checkpoint, dtype: torch.dtype | None) -> WrappedLayers:
    """Read embedding, what follows it and head; `dtype` None keeps the embedding's stored dtype."""
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
    return WrappedLayers(embedding, multiplier, positions, WrappedHead(model, shell.decoder_name))


def _find_name(parent: nn.Module, child: nn.Module) -> str:
    return next(name for name, module in parent.named_modules() if module is child)
