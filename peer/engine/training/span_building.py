"""Builds the modules of a span with fresh weights, in memory for these modules alone.

The weights of each module follow from the seed of the run and the name of the module, so that every
layout of stages begins with the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from ....models.shells.shell import Shell
from ....models.shells.shell_opening import open_shell
from ....models.shells.tables import fill_tables
from ....protocol.runs.training_run import TrainingRun
from ....protocol.spans import Span


class SpanModules:
    """The modules of a span, on the CPU in float32, and how hidden states go through them.

    The first span of a model begins with its embedding, the last one ends with its head. Tied
    weights are at both ends, under the name of the embedding.

    Tensor suffixes: B rows, T tokens, H hidden, V vocabulary.
    """

    def __init__(self, shell: Shell, span: Span) -> None:
        self.is_first = span.start == 0
        self.is_last = span.stop == len(shell.layers)
        self._multiplier = shell.embedding_multiplier
        self._embedding, _ = find_ends(shell)
        self.hidden_size: int = shell.config.hidden_size
        self.vocabulary_size = self._embedding.num_embeddings
        self._decoder = shell.cut(list(range(span.start, span.stop)), has_positions=self.is_first)
        self._head = shell.cut_model() if self.is_last else None
        self.parameters: dict[str, nn.Parameter] = {
            name: weight for name, weight in shell.model.named_parameters() if not weight.is_meta
        }
        """By their names in a checkpoint."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, T, H], or logits [B, T, V] behind the last block.

        The inputs are token ids [B, T] for the first span, and hidden states for the others.
        """
        hidden_BTH = self._embedding(inputs) * self._multiplier if self.is_first else inputs
        hidden_BTH = self._decoder(inputs_embeds=hidden_BTH, use_cache=False).last_hidden_state
        if self._head is None:
            return hidden_BTH
        return self._head(inputs_embeds=hidden_BTH, use_cache=False).logits


def build_span(run: TrainingRun, span: Span) -> SpanModules:
    """Return a span of the run's model as it is before the first update.

    Raises ModelError for a model that does not run block by block.
    """
    shell = open_shell(run.model)
    if shell.model._supports_sdpa:  # the others keep the plain products, which are slower
        shell.config._attn_implementation = "sdpa"
    _fill(shell, span, run.derive_seed)
    shell.model.train()
    return SpanModules(shell, span)


@torch.no_grad()
def _fill(shell: Shell, span: Span, derive_seed: Callable[..., int]) -> None:
    model = shell.model
    embedding, head = find_ends(shell)
    is_tied = head.weight is embedding.weight
    parts = [shell.layers[index] for index in range(span.start, span.stop)]
    is_last = span.stop == len(shell.layers)
    if span.start == 0 or (is_last and is_tied):
        parts.append(embedding)
    if span.start == 0 and shell.positions_name is not None:
        parts.append(shell.decoder.get_submodule(shell.positions_name))
    if is_last:
        parts.append(shell.decoder.get_submodule(shell.norm_name))
    if is_last and not is_tied:
        parts.append(head)
    names = {module: name for name, module in model.named_modules()}
    for part in parts:
        fill_tables(model, part)  # first: it would overwrite weights
        for module in part.modules():
            weights = {name: w for name, w in module._parameters.items() if w is not None}
            for name, weight in weights.items():
                empty = torch.empty_like(weight, device="cpu", dtype=torch.float32)
                module._parameters[name] = nn.Parameter(empty)
            if weights:
                torch.manual_seed(derive_seed("weights", names[module]))
                model._init_weights(module)
    if is_tied:
        head.weight = embedding.weight


def find_ends(shell: Shell) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding and the head; opening the shell has checked what they are."""
    ends = shell.model.get_input_embeddings(), shell.model.get_output_embeddings()
    return cast(tuple[nn.Embedding, nn.Linear], ends)
