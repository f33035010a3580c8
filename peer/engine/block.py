"""One decoder block: norms, attention and MLP, in the order that its spec says.

Tensor suffixes: N rows of all segments (batch times tokens), H hidden.
"""

from collections.abc import Mapping, Sequence

import torch

from ...kernels.norm import Norm
from .attention import Attention
from .mlp import Mlp
from .rows import RowRange, Segments
from .spec import Residual


class Block:
    """One decoder block; `norms` are those that the spec names, and the others do nothing.

    `is_cut_anywhere`: where a prompt is cut into parts makes no difference to its attention, which
    `attention_kernels` compute. `has_fixed_shapes`: what is done for generated tokens follows from
    how many there are.
    """

    def __init__(
        self, residual: Residual, norms: Mapping[str, Norm], attention: Attention, mlp: Mlp
    ) -> None:
        parts = (*norms.values(), attention, mlp)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.num_parameters = sum(part.num_parameters for part in parts)
        self.is_cut_anywhere = attention.is_cut_anywhere
        self.attention_kernels = attention.kernels
        self.has_fixed_shapes = attention.has_fixed_shapes and mlp.has_fixed_shapes
        self._residual = residual
        self._norms = norms
        self._attention = attention
        self._mlp = mlp

    def __call__(
        self, hidden_NH: torch.Tensor, segments: Segments, ranges: Sequence[RowRange]
    ) -> torch.Tensor:
        """Return the block's output; writes the new keys and values into the segments' caches."""
        normed_NH = self._norm("attention_norm", hidden_NH)
        attended_NH = self._attention(normed_NH, segments, ranges)
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
