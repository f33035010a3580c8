"""One decoder block: norms, attention and MLP, in the order that its spec says.

The MLP, or a mixture of experts, computes each token for itself; attention has a file of its own.

Tensor suffixes: N tokens of a batch, H hidden, O output or inner features, K chosen experts of a
token.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from ....kernels.layers.activations import Activation
from ....kernels.layers.expert_routing import Router
from ....kernels.layers.gated_mlp import gate
from ....kernels.layers.norm import Norm
from ....kernels.layers.row_kernels import RowKernels
from ....kernels.linear.linear import Linear, get_values
from ....kernels.linear.quantize import Rows
from ....models.specs.model_spec import ExpertsSpec, Residual
from .attention import Attention
from .batch import (
    HostedBlock,
    PassBatch,
    StepBatch,
    TokenRange,
    apply_linear,
    differentiate,
)


class Mlp(ABC):
    """The MLP of a block, which computes each token from that token alone."""

    num_bytes: int
    has_fixed_shapes = True
    """Whether its work follows from the number of tokens alone."""
    last: Linear | None = None
    """The linear whose output is that of the MLP, if there is one."""
    linears: Mapping[str, Linear] = MappingProxyType({})
    """Those that adapters may change, by our names for them."""

    @abstractmethod
    def __call__(
        self, normed: Rows, ranges: Sequence[TokenRange], hidden_NH: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output, added to the hidden states if they are given.

        `ranges` covers all tokens.
        """


class GatedMlp(Mlp):
    """`down(activation(gate(x)) * up(x))`, with gate and up as one linear."""

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        activation: Activation,
        kernels: RowKernels | None = None,
    ) -> None:
        self.num_bytes = gate_up.num_bytes + down.num_bytes
        self.linears = {"gate_up": gate_up, "down": down}
        self._gate_up = gate_up
        self._down = self.last = down
        self._activation = activation
        self._gate = gate if kernels is None else kernels.gate

    def __call__(
        self, normed: Rows, ranges: Sequence[TokenRange], hidden_NH: torch.Tensor | None
    ) -> torch.Tensor:
        inner = self._gate(self._activation, apply_linear(self._gate_up, normed, ranges))
        return apply_linear(self._down, inner, ranges, hidden_NH)


class PlainMlp(Mlp):
    """`down(activation(up(x)))`."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self.num_bytes = up.num_bytes + down.num_bytes
        self.linears = {"up": up, "down": down}
        self._up = up
        self._down = self.last = down
        self._activation = activation

    def __call__(
        self, normed: Rows, ranges: Sequence[TokenRange], hidden_NH: torch.Tensor | None
    ) -> torch.Tensor:
        inner_NO = self._activation(apply_linear(self._up, normed, ranges))
        return apply_linear(self._down, inner_NO, ranges, hidden_NH)


class Experts(Mlp):
    """A router and many MLPs; each token is computed by the few that the router chooses for it."""

    has_fixed_shapes = False

    def __init__(self, spec: ExpertsSpec, router: Router, experts: Sequence[Mlp]) -> None:
        self.num_bytes = router.num_bytes + sum(expert.num_bytes for expert in experts)
        self._spec = spec
        self._router = router
        self._experts = experts

    def __call__(
        self, normed: Rows, ranges: Sequence[TokenRange], hidden_NH: torch.Tensor | None
    ) -> torch.Tensor:
        normed_NH = get_values(normed)
        output_NH = torch.cat(
            [self._compute(normed_NH[part.start : part.stop], part) for part in ranges]
        )
        return output_NH if hidden_NH is None else hidden_NH + output_NH

    def _compute(self, normed_NH: torch.Tensor, part: TokenRange) -> torch.Tensor:
        """Let each chosen expert compute its tokens together.

        A token's results are added in the order of its experts, whatever other tokens there are.
        """
        experts_NK, shares_NK = self._router(
            normed_NH, self._spec.num_chosen, is_normalized=self._spec.is_normalized
        )
        shares_NK = shares_NK.to(normed_NH.dtype)
        output_NH = torch.zeros_like(normed_NH)
        for expert in experts_NK.unique().tolist():
            tokens, choices = torch.where(experts_NK == expert)
            computed_NH = self._experts[expert](
                normed_NH[tokens], [replace(part, start=0, stop=len(tokens))], None
            )
            output_NH.index_add_(0, tokens, computed_NH * shares_NK[tokens, choices, None])
        return output_NH


class Block(HostedBlock):
    """One decoder block of ours; `norms` are those that the spec names, the others do nothing."""

    def __init__(
        self,
        residual: Residual,
        norms: Mapping[str, Norm],
        attention: Attention,
        mlp: Mlp,
        kernels: RowKernels | None,
    ) -> None:
        parts = (*norms.values(), attention, mlp)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.is_cut_anywhere = attention.is_cut_anywhere
        self.attention_kernels = attention.kernels
        self.has_fixed_shapes = attention.has_fixed_shapes and mlp.has_fixed_shapes
        self.linears = {**attention.linears, **mlp.linears}
        self._residual = residual
        self._norms = norms
        self._attention = attention
        self._mlp = mlp
        self._kernels = kernels
        # Experts choose their tokens among all, so that each expert's weights are read once.
        self._is_whole = not mlp.has_fixed_shapes

    def __call__(
        self, hidden_NH: torch.Tensor, batch: StepBatch, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        normed = self._norm("attention_norm", hidden_NH)
        fused_NO = self._attention.project(normed, ranges)
        attended_NO = self._attention.attend(fused_NO, batch)
        return self._add_up(hidden_NH, normed, attended_NO, ranges)

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
        return self._attention.project(self._norm("attention_norm", hidden_NH), ranges)

    def _finish(
        self, hidden_NH: torch.Tensor, attended_NO: torch.Tensor, ranges: Sequence[TokenRange]
    ) -> torch.Tensor:
        is_normed_once = self._residual is Residual.PARALLEL and "mlp_norm" not in self._norms
        normed = self._norm("attention_norm", hidden_NH) if is_normed_once else hidden_NH
        return self._add_up(hidden_NH, normed, attended_NO, ranges)

    def _add_up(
        self,
        hidden_NH: torch.Tensor,
        normed: Rows,
        attended_NO: torch.Tensor,
        ranges: Sequence[TokenRange],
    ) -> torch.Tensor:
        input_NH = hidden_NH
        if (norm := self._norms.get("attention_output_norm")) is None:
            hidden_NH = self._attention.finish(attended_NO, ranges, hidden_NH)
        else:
            hidden_NH = hidden_NH + norm(self._attention.finish(attended_NO, ranges, None))
        if self._residual is Residual.SEQUENTIAL:
            normed = self._norm("mlp_norm", hidden_NH)
        elif "mlp_norm" in self._norms:
            normed = self._norm("mlp_norm", input_NH)
        if (norm := self._norms.get("mlp_output_norm")) is None:
            return self._mlp(normed, ranges, hidden_NH)
        return hidden_NH + norm(self._mlp(normed, ranges, None))

    def _norm(self, name: str, hidden_NH: torch.Tensor) -> Rows:
        if name not in self._norms:
            return hidden_NH
        norm = self._norms[name]
        return norm(hidden_NH) if self._kernels is None else self._kernels.norm(norm, hidden_NH)
