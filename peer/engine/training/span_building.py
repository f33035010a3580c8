"""Builds the modules of a span with fresh weights, in memory for these modules alone.

The weights of each module follow from the seed of the run and the name of the module, so that every
layout of stages begins with the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from ....models.shells.shell import Shell
from ....models.shells.shell_opening import open_shell
from ....models.shells.tables import fill_tables
from ....protocol.errors import ModelError
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
        self._embedding, head = find_embedding_and_head(shell)
        self.hidden_size: int = shell.config.hidden_size
        self.vocabulary_size = self._embedding.num_embeddings
        self._decoder = shell.cut(list(range(span.start, span.stop)), has_positions=self.is_first)
        self._head = shell.cut_model() if self.is_last else None
        self.parameters: dict[str, nn.Parameter] = {
            name: weight
            for name, weight in shell.model.named_parameters()
            if weight.requires_grad and not weight.is_meta
        }
        """What is trained, by the names in a checkpoint."""
        self.constants: dict[str, Tensor] = {
            name: tensor.detach()
            for name, tensor in _list_checkpoint(shell.model).items()
            if name not in self.parameters and not tensor.is_meta
        }
        """What is not, but is in a checkpoint: other weights, and buffers."""
        has_one_end = self.is_first != self.is_last
        self.tied_names = [
            name
            for name, weight in self.parameters.items()
            if has_one_end and weight is self._embedding.weight and weight is head.weight
        ]
        """Those that the span at the other end has as well."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return hidden states [B, T, H], or logits [B, T, V] behind the last block.

        The inputs are token ids [B, T] for the first span, and hidden states for the others.
        """
        hidden_BTH = self._embedding(inputs) * self._multiplier if self.is_first else inputs
        hidden_BTH = self._decoder(inputs_embeds=hidden_BTH, use_cache=False).last_hidden_state
        if self._head is None:
            return hidden_BTH
        return self._head(inputs_embeds=hidden_BTH, use_cache=False).logits

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the same without dropout, and without a graph."""
        modules: list[nn.Module] = [self._decoder, *([] if self._head is None else [self._head])]
        for module in modules:
            module.eval()
        try:
            with torch.no_grad():
                return self(inputs)
        finally:
            for module in modules:
                module.train()


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


def list_span_modules(shell: Shell, span: Span) -> list[nn.Module]:
    """Return the modules whose weights a span holds."""
    embedding, head = find_embedding_and_head(shell)
    is_tied = head.weight is embedding.weight
    is_last = span.stop == len(shell.layers)
    modules: list[nn.Module] = [shell.layers[index] for index in range(span.start, span.stop)]
    if span.start == 0 or (is_last and is_tied):
        modules.append(embedding)
    if span.start == 0 and shell.positions_name is not None:
        modules.append(shell.decoder.get_submodule(shell.positions_name))
    if is_last:
        modules.append(shell.decoder.get_submodule(shell.norm_name))
    if is_last and (not is_tied or head.bias is not None):
        modules.append(head)
    return modules


@torch.no_grad()
def _fill(shell: Shell, span: Span, derive_seed: Callable[..., int]) -> None:
    """Give the modules of a span memory and the first weights of transformers' own models."""
    embedding, head = find_embedding_and_head(shell)
    is_tied = head.weight is embedding.weight
    parts = list_span_modules(shell, span)
    names = {module: name for name, module in shell.model.named_modules()}
    for part in parts:
        fill_tables(shell.model, part)  # first: it would overwrite weights
        for module in part.modules():
            _allocate(module)
        model = shell.model if part is head else shell.decoder
        for module in _list_inside_out(part):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(derive_seed("weights", names[module]))
                model._init_weights(module)
        _check_filled(part, names[part], shell.config.model_type)
    if is_tied:
        head.weight = embedding.weight


def _list_inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a module before itself: some reset weights of those in them (GPT-2)."""
    for child in module.children():
        yield from _list_inside_out(child)
    yield module


def _allocate(module: nn.Module) -> None:
    """Give weights and persistent buffers memory; numbers that nobody sets are found by NaN."""
    for name, weight in module._parameters.items():
        if weight is not None:
            empty = torch.full_like(weight, math.nan, device="cpu", dtype=torch.float32)
            module._parameters[name] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and buffer.is_floating_point():
            module._buffers[name] = torch.full_like(buffer, math.nan, device="cpu")


def _check_filled(part: nn.Module, name: str, model_type: str) -> None:
    for local_name, tensor in chain(part.named_parameters(), part.named_buffers()):
        if tensor.is_meta or bool(tensor.isnan().any()):
            raise ModelError(
                f"models of type {model_type!r:.60} cannot be trained from scratch: transformers "
                f"gives {name}.{local_name} no initial values"
            )


def _list_checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and persistent buffers; those with two names have one."""
    passing = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    }
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) not in passing}


def list_weights(shell: Shell, span: Span) -> dict[str, Tensor]:
    """Return the weights and buffers of a span in a shell, by their names in a checkpoint."""
    modules = list_span_modules(shell, span)
    own = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
    tensors = _list_checkpoint(shell.model)
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in own}


def find_embedding_and_head(shell: Shell) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding and the head; opening the shell has checked what they are."""
    ends = shell.model.get_input_embeddings(), shell.model.get_output_embeddings()
    return cast(tuple[nn.Embedding, nn.Linear], ends)
