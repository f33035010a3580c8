import torch
import torch.nn.functional as F

from shoal.kernels.layers.gated_mlp import gate_silu
from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.quantize import WeightFormat
from shoal.kernels.linear.select import make_linear
from shoal.peer.engine.blocks.batch import TokenRange
from shoal.peer.engine.blocks.block import Activation, GatedMlp

NUM_INNER = 45


def compute_inner(activation: Activation, hidden_NH: torch.Tensor) -> torch.Tensor:
    """Return what goes into the last linear of a gated MLP whose first one is no change."""
    gate_up, down = (
        make_linear(torch.eye(size), None, WeightFormat.FP32, torch.float32)
        for size in (2 * NUM_INNER, NUM_INNER)
    )
    ranges = [TokenRange(0, len(hidden_NH), RowPrecision.TWO_DIGITS)]
    return GatedMlp(gate_up, down, activation)(hidden_NH, ranges, None)


def test_gated_mlp_leaves_silu_to_the_kernel_and_other_activations_to_torch() -> None:
    draw = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(30, 2 * NUM_INNER, generator=draw)
    gate, up = hidden_NH.chunk(2, dim=-1)

    assert torch.equal(compute_inner(F.silu, hidden_NH), gate_silu(hidden_NH))
    torch.testing.assert_close(compute_inner(F.silu, hidden_NH), F.silu(gate) * up)
    assert torch.equal(compute_inner(F.gelu, hidden_NH), F.gelu(gate) * up)
