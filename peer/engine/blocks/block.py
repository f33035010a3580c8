"""One decoder block: norms, attention and MLP, in the order that its spec says.

Tensor suffixes: N tokens of a batch, H hidden, O output features.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ....kernels.layers.norm import Norm
from ....models.specs.model_spec import Residual
from .attention import Attention
from .batch import HostedBlock, PassBatch, StepBatch, TokenRange, differentiate
from .mlp import Mlp


class Block(HostedBlock):
    """One decoder block of ours; `norms` are those that the spec names, the others do nothing."""

    def __init__(
        self, residual: Residual, norms: Mapping[str, Norm], attention: Attention, mlp: Mlp
    ) -> None:
        parts = (*norms.values(), attention, mlp)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.num_parameters = sum(part.num_parameters for part in parts)
        self.is_cut_anywhere = attention.is_cut_anywhere
        self.attention_kernels = attention.kernels
        self.has_fixed_shapes = attention.has_fixed_shapes and mlp.has_fixed_shapes
        self.linears = {**attention.linears, **mlp.linears}
        self._residual = residual
        self._norms = norms
        self._attention = attention
        self._mlp = mlp
        # Experts choose their tokens among all, so that each expert's weights are read once.
        self._is_whole = not mlp.has_fixed_shapes

    def __call__(
        self, hidden_NH: torch.Tensor, batch: StepBatch, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        normed_NH = self._norm("attention_norm", hidden_NH)
        fused_NO = self._attention.project(normed_NH, ranges)
        attended_NO = self._attention.attend(fused_NO, batch)
        return self._add_up(hidden_NH, normed_NH, attended_NO, ranges)

    def run_pass(self, hidden_NH: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        pieces = batch.cut(is_whole=self._is_whole)
        attended_NO = self._attention.attend_without_cache(
            self._project_all(hidden_NH, pieces), batch
        )
        return torch.cat(
            [self._finish(hidden_NH[piece], attended_NO[piece], ranges) for piece, ranges in pieces]
        )

    def run_pass_back(
        self, hidden_NH: torch.Tensor, grads_NH: torch.Tensor, batch: PassBatch
    ) -> torch.Tensor:
        # Its output is added to the block's output, which the backward pass does not need.
        last = None if "mlp_output_norm" in self._norms else self._mlp.last
        pieces = batch.cut(is_whole=self._is_whole, unread=last)
        fused_NO = self._project_all(hidden_NH, pieces).requires_grad_()
        with torch.enable_grad():
            attended_NO = self._attention.attend_without_cache(fused_NO, batch)
        hidden_grads_NH, attended_grads_NO = (
            torch.empty_like(hidden_NH),
            torch.empty_like(attended_NO),
        )
        for piece, ranges in pieces:
            hidden_grads_NH[piece], attended_grads_NO[piece] = differentiate(
                partial(self._finish, ranges=ranges),
                (hidden_NH[piece], attended_NO[piece]),
                grads_NH[piece],
            )
        (fused_grads_NO,) = torch.autograd.grad(attended_NO, fused_NO, attended_grads_NO)
        for piece, ranges in batch.cut(is_whole=self._is_whole, unread=self._attention.first):
            (more_NH,) = differentiate(
                partial(self._project, ranges=ranges), (hidden_NH[piece],), fused_grads_NO[piece]
            )
            hidden_grads_NH[piece] += more_NH
        return hidden_grads_NH

    def _project_all(
        self, hidden_NH: torch.Tensor, pieces: Sequence[tuple[slice, Sequence[TokenRange]]]
    ) -> torch.Tensor:
        return torch.cat([self._project(hidden_NH[piece], ranges) for piece, ranges in pieces])

    def _project(self, hidden_NH: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
        """Return queries, keys and values of some tokens."""
        return self._attention.project(self._norm("attention_norm", hidden_NH), ranges)

    def _finish(
        self, hidden_NH: torch.Tensor, attended_NO: torch.Tensor, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        """Return the output of tokens that have attended."""
        is_normed_once = self._residual is Residual.PARALLEL and "mlp_norm" not in self._norms
        normed_NH = self._norm("attention_norm", hidden_NH) if is_normed_once else hidden_NH
        return self._add_up(hidden_NH, normed_NH, attended_NO, ranges)

    def _add_up(
        self,
        hidden_NH: torch.Tensor,
        normed_NH: torch.Tensor,
        attended_NO: torch.Tensor,
        ranges: Sequence[TokenRange],
    ) -> torch.Tensor:
        attended_NH = self._attention.finish(attended_NO, ranges)
        attended_NH = self._norm("attention_output_norm", attended_NH)
        if self._residual is Residual.PARALLEL:
            if "mlp_norm" in self._norms:
                normed_NH = self._norm("mlp_norm", hidden_NH)
            hidden_NH = hidden_NH + attended_NH
        else:
            hidden_NH = hidden_NH + attended_NH
            normed_NH = self._norm("mlp_norm", hidden_NH)
        return hidden_NH + self._norm("mlp_output_norm", self._mlp(normed_NH, ranges))

    def _norm(self, name: str, hidden_NH: torch.Tensor) -> torch.Tensor:
        return self._norms[name](hidden_NH) if name in self._norms else hidden_NH
