"""The half of a block that computes each token for itself: one MLP, or a mixture of experts.

Tensor suffixes: N tokens of a batch, H hidden, O inner features,
K chosen experts of a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F

from ....kernels.layers.gate import gate_silu
from ....kernels.layers.routing import Router
from ....kernels.linear.linear import Linear
from ....models.specs.model_spec import ExpertsSpec
from .batch import TokenRange, apply_linear

Activation = Callable[[torch.Tensor], torch.Tensor]


class Mlp(ABC):
    """The MLP of a block, which computes each token from that token alone."""

    num_bytes: int
    num_parameters: int
    has_fixed_shapes = True
    """Whether its work follows from the number of tokens alone."""
    last: Linear | None = None
    """The linear whose output is that of the MLP, if there is one."""
    linears: Mapping[str, Linear] = MappingProxyType({})
    """Those that adapters may change, by our names for them."""

    @abstractmethod
    def __call__(self, normed_NH: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
        """Return the output, which is added to the hidden states; `ranges` covers all tokens."""


class GatedMlp(Mlp):
    """`down(activation(gate(x)) * up(x))`, with gate and up as one linear."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.num_bytes = gate_up.num_bytes + down.num_bytes
        self.num_parameters = gate_up.num_parameters + down.num_parameters
        self.linears = {"gate_up": gate_up, "down": down}
        self._gate_up = gate_up
        self._down = self.last = down
        self._activation = activation

    def __call__(self, normed_NH: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
        fused_NO = apply_linear(self._gate_up, normed_NH, ranges)
        if self._activation is F.silu:
            return apply_linear(self._down, gate_silu(fused_NO), ranges)
        gate_NO, up_NO = fused_NO.chunk(2, dim=-1)
        return apply_linear(self._down, self._activation(gate_NO) * up_NO, ranges)


class PlainMlp(Mlp):
    """`down(activation(up(x)))`."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self.num_bytes = up.num_bytes + down.num_bytes
        self.num_parameters = up.num_parameters + down.num_parameters
        self.linears = {"up": up, "down": down}
        self._up = up
        self._down = self.last = down
        self._activation = activation

    def __call__(self, normed_NH: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
        inner_NO = self._activation(apply_linear(self._up, normed_NH, ranges))
        return apply_linear(self._down, inner_NO, ranges)


class Experts(Mlp):
    """A router and many MLPs; each token is computed by the few that the router chooses for it."""

    has_fixed_shapes = False

    def __init__(self, spec: ExpertsSpec, router: Router, experts: Sequence[Mlp]) -> None:
        self.num_bytes = router.num_bytes + sum(expert.num_bytes for expert in experts)
        self.num_parameters = router.num_parameters + sum(
            expert.num_parameters for expert in experts
        )
        self._spec = spec
        self._router = router
        self._experts = experts

    def __call__(self, normed_NH: torch.Tensor, ranges: Sequence[TokenRange]) -> torch.Tensor:
        return torch.cat(
            [self._compute(normed_NH[part.start : part.stop], part) for part in ranges]
        )

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
                normed_NH[tokens], [replace(part, start=0, stop=len(tokens))]
            )
            output_NH.index_add_(0, tokens, computed_NH * shares_NK[tokens, choices, None])
        return output_NH
