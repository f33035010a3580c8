"""The interface of the engine to a block, whether it is ours or a layer of transformers.

Tensor suffixes: N tokens of a batch, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from ....kernels.linear.linear import Linear
from .batch import PassBatch, StepBatch, TokenRange


class HostedBlock(ABC):
    """One decoder block with its weights on the device.

    `is_cut_anywhere`: its attention gives the same wherever a prompt is cut into parts.
    `has_fixed_shapes`: its work for generated tokens follows from their number alone.
    `attention_kernels` name what attends, for people. `linears` are those that adapters may change,
    by our names for them.
    """

    num_bytes: int
    num_parameters: int
    is_cut_anywhere: bool
    has_fixed_shapes: bool
    attention_kernels: Sequence[str]
    linears: Mapping[str, Linear]

    @abstractmethod
    def __call__(
        self, hidden_NH: torch.Tensor, batch: StepBatch, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        """Return the block's output; writes new keys and values into the sessions' memory."""

    @abstractmethod
    def run_pass(self, hidden_NH: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        """Return the block's output for a batch without KV caches."""

    @abstractmethod
    def run_pass_back(
        self, hidden_NH: torch.Tensor, grads_NH: torch.Tensor, batch: PassBatch
    ) -> torch.Tensor:
        """Return the gradients of the block's input, given those of its output."""
