"""Blocks of families that have no file here: each runs through transformers' own layer.

Slower than ours, and with float weights only: every session's step is computed by itself, and
each block draws its masks and rotations anew. Imported only for such a family, because
transformers takes seconds to import.

Tensor suffixes: N tokens of a batch, B rows and T tokens of one step, H hidden.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ....kernels.linear.linear import Linear
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.checkpoints.conversion import ConvertedCheckpoint
from ....models.shells.shell_opening import open_shell
from ....models.shells.step_cache import CACHE_NAME, CacheShape, StepCache
from ....models.shells.tables import count_table_bytes
from ..devices.device import Numerics
from .batch import (
    BatchedStep,
    HostedBlock,
    PassBatch,
    StepBatch,
    TokenRange,
    count_part_tokens,
    differentiate,
)


class WrappedBlock(HostedBlock):
    """One decoder layer of transformers, with the memory of a session as its cache."""

    is_cut_anywhere = False
    has_fixed_shapes = False
    attention_kernels = ("torch",)
    linears: Mapping[str, Linear] = MappingProxyType({})

    def __init__(
        self, decoder: PreTrainedModel, index: int, cache_shape: CacheShape, table_bytes: int
    ) -> None:
        weights = [weight for weight in decoder.parameters() if not weight.is_meta]
        self.num_bytes = sum(weight.nbytes for weight in weights) + table_bytes
        self._decoder = decoder
        self._index = index
        self._cache_shape = cache_shape

    def __call__(
        self, hidden_NH: torch.Tensor, batch: StepBatch, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        return torch.cat([self._compute(hidden_NH, step) for step in batch.steps])

    def run_pass(self, hidden_NH: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        parts = hidden_NH.split(batch.num_tokens)
        return torch.cat([self._run_row(part, batch) for part in parts])

    def run_pass_back(
        self, hidden_NH: torch.Tensor, grads_NH: torch.Tensor, batch: PassBatch
    ) -> torch.Tensor:
        run = partial(self._run_row, batch=batch)
        num_tokens = batch.num_tokens
        parts = zip(hidden_NH.split(num_tokens), grads_NH.split(num_tokens), strict=True)
        return torch.cat([differentiate(run, (part,), grads)[0] for part, grads in parts])

    def _run_row(self, hidden_TH: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        batch.pauses.give_way()
        cache = StepCache(0)
        return self._run(hidden_TH[None], cache)[0]

    def _compute(self, hidden_NH: torch.Tensor, step: BatchedStep) -> torch.Tensor:
        hidden_BTH = hidden_NH[step.start : step.stop].view(step.num_rows, step.num_tokens, -1)
        put = partial(step.memory.put, self._index)
        # As in our own attention: the stride follows from the step alone, so that a replay
        # computes what was computed.
        stride = 1 if step.is_decoded else count_part_tokens(step.num_rows)
        parts = [
            self._run(
                hidden_BTH[:, first : first + stride],
                StepCache(step.position + first, put, self._cache_shape),
            )
            for first in range(0, step.num_tokens, stride)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _run(self, hidden_BTH: torch.Tensor, cache: StepCache) -> torch.Tensor:
        options: dict[str, Any] = {CACHE_NAME: cache}
        return self._decoder(inputs_embeds=hidden_BTH, use_cache=True, **options).last_hidden_state


class WrappedLoader:
    """Loads blocks one by one into a shell of the model."""

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics) -> None:
        self._dtype = numerics.dtype
        self._torch_device = numerics.device.torch_device
        self._shell = open_shell(checkpoint.config)
        self._checkpoint = ConvertedCheckpoint(checkpoint, self._shell.model)

    def load(self, index: int) -> WrappedBlock:
        """Load one block; a missing or misshapen tensor is a ModelError that names it."""
        self._shell.load_layer(self._checkpoint, index, self._dtype)
        decoder = self._shell.cut([index])
        _bring(decoder, self._torch_device)
        # All blocks share the decoder's other buffers.
        table_bytes = count_table_bytes(self._shell.layers[index])
        return WrappedBlock(decoder, index, self._shell.cache_shape, table_bytes)


def _bring(decoder: PreTrainedModel, torch_device: torch.device) -> None:
    """Have everything on a device that is more than a shape."""
    for module in decoder.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.is_meta:
                module._parameters[name] = nn.Parameter(
                    weight.to(torch_device), requires_grad=False
                )
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(torch_device)
