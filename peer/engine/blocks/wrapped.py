"""Blocks of families that have no file here: each runs through transformers' own layer.

Slower than ours, and with float weights only: every session's step is computed by itself, and
each block draws its masks and rotations anew. Imported only for such a family, because
transformers takes seconds to import.

Tensor suffixes: N rows of all segments (batch times tokens), B rows and T tokens of one segment,
H hidden.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from ....kernels.linear.linear import Linear
from ....models.checkpoints.checkpoint import Checkpoint
from ....models.checkpoints.conversion import ConvertedCheckpoint
from ....models.shells.shell_opening import open_shell
from ....models.shells.step_cache import KeptShape, StepCache
from ....models.shells.tables import count_table_bytes
from ..scheduler import count_part_tokens
from .numerics import Numerics
from .pass_rows import PassRows, differentiate
from .rows import RowRange, Segment, Segments


class WrappedBlock:
    """One decoder layer of transformers, with the memory of a session as its cache."""

    is_cut_anywhere = False
    has_fixed_shapes = False
    attention_kernels = ("torch",)
    linears: Mapping[str, Linear] = MappingProxyType({})

    def __init__(
        self, decoder: PreTrainedModel, index: int, kept: KeptShape, table_bytes: int
    ) -> None:
        weights = [weight for weight in decoder.parameters() if not weight.is_meta]
        self.num_bytes = sum(weight.nbytes for weight in weights) + table_bytes
        self.num_parameters = sum(weight.numel() for weight in weights)
        self._decoder = decoder
        self._index = index
        self._kept = kept

    def __call__(
        self, hidden_NH: torch.Tensor, segments: Segments, ranges: Sequence[RowRange]
    ) -> torch.Tensor:
        """Return the block's output; writes the new keys and values into the segments' caches."""
        return torch.cat([self._compute(hidden_NH, segment) for segment in segments.all])

    def run_pass(self, hidden_NH: torch.Tensor, rows: PassRows) -> torch.Tensor:
        """Return the block's output for texts that need no cache."""
        parts = hidden_NH.split(rows.num_tokens)
        return torch.cat([self._run_row(part, rows) for part in parts])

    def run_pass_back(
        self, hidden_NH: torch.Tensor, grads_NH: torch.Tensor, rows: PassRows
    ) -> torch.Tensor:
        """Return the gradients of the block's input, given those of its output."""
        run = partial(self._run_row, rows=rows)
        parts = zip(hidden_NH.split(rows.num_tokens), grads_NH.split(rows.num_tokens), strict=True)
        return torch.cat([differentiate(run, (part,), grads)[0] for part, grads in parts])

    def _run_row(self, hidden_TH: torch.Tensor, rows: PassRows) -> torch.Tensor:
        rows.pauses.give_way()
        cache = StepCache(0)
        output = self._decoder(inputs_embeds=hidden_TH[None], past_key_values=cache, use_cache=True)
        return output.last_hidden_state[0]

    def _compute(self, hidden_NH: torch.Tensor, segment: Segment) -> torch.Tensor:
        hidden_BTH = hidden_NH[segment.start : segment.stop].view(
            segment.num_rows, segment.num_tokens, -1
        )
        put = partial(segment.cache.put, self._index)
        # As in our own attention: the stride follows from the step alone, so that a replay
        # computes what was computed.
        stride = 1 if segment.is_decoded else count_part_tokens(segment.num_rows)
        parts = [
            self._decoder(
                inputs_embeds=hidden_BTH[:, first : first + stride],
                past_key_values=StepCache(segment.position + first, put, self._kept),
                use_cache=True,
            ).last_hidden_state
            for first in range(0, segment.num_tokens, stride)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


class WrappedLoader:
    """Loads blocks one by one into a shell of the model."""

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics) -> None:
        self._dtype = numerics.dtype
        self._place = numerics.device.place
        self._shell = open_shell(checkpoint.config)
        self._checkpoint = ConvertedCheckpoint(checkpoint, self._shell.model)

    def load(self, index: int) -> WrappedBlock:
        """Load one block; a missing or misshapen tensor is a ModelError that names it."""
        self._shell.load_layer(self._checkpoint, index, self._dtype)
        decoder = self._shell.cut([index])
        _bring(decoder, self._place)
        # What the decoder keeps beside its blocks all of them share.
        table_bytes = count_table_bytes(self._shell.layers[index])
        return WrappedBlock(decoder, index, self._shell.kept, table_bytes)


def _bring(decoder: PreTrainedModel, place: torch.device) -> None:
    """Have everything on a device that is more than a shape."""
    for module in decoder.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.is_meta:
                module._parameters[name] = nn.Parameter(weight.to(place), requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(place)
