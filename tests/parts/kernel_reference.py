"""The slow, obvious version of every kernel, in float64 and loops: what the tests compare with.

It is here because nothing of the product uses it.
"""

from typing import Any

import torch
from torch import Tensor

from shoal.kernels.attention.int8_kv import dequantize_kv
from shoal.kernels.linear.quantize import Int8Weight


def linear_int8(
    hidden_NI: Tensor, weight: Int8Weight, bias_O: Tensor | None, num_digits: int
) -> Tensor:
    """Return the float32 product by the rules of quantize.py, one row and one output at a time."""
    rows = []
    for row_I in hidden_NI:
        whole_I, step = round_row(row_I, num_digits)
        sums_O = torch.stack([(row * whole_I).sum() for row in weight.values_OI.to(torch.int64)])
        rows.append(sums_O.float() * step * weight.scales_O)
    result_NO = torch.stack(rows)
    return result_NO if bias_O is None else result_NO + bias_O.float()


def round_row(row_I: Tensor, num_digits: int) -> tuple[Tensor, Tensor]:
    """Return the whole numbers that a row of activations becomes, and what a one stands for."""
    limit = torch.tensor({1: 127.0, 2: 127.0 * 256 + 127}[num_digits])
    absmax = row_I.float().abs().max().clamp_min(2.0**-100)
    return torch.round(row_I.float() * (limit / absmax)).to(torch.int64), absmax / limit


def linear_unrounded(hidden_NI: Tensor, weight: Int8Weight, bias_O: Tensor | None) -> Tensor:
    """Return the float64 product of unrounded activations with the quantized weight."""
    weight_OI = weight.values_OI.double() * weight.scales_O.double()[:, None]
    product_NO = hidden_NI.double() @ weight_OI.t()
    return product_NO if bias_O is None else product_NO + bias_O.double()


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the float64 value of hidden / root(mean(hidden**2) + eps) * weight."""
    wide = hidden.double()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return wide / torch.sqrt(mean_square + eps) * weight.double()


def layer_norm(hidden: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the float64 value of (hidden - mean) / root(variance + eps) * weight + bias."""
    centred = hidden.double() - hidden.double().mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight.double() + bias.double()


def apply_rotary(states_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (d, d + D/2) as a complex number, in float64, one position at a time."""
    width = cos_TD.shape[-1]
    half = width // 2
    turned = states_BHTD.double().clone()
    for position in range(states_BHTD.shape[2]):
        for pair in range(half):
            cos, sin = cos_TD[position, pair].double(), sin_TD[position, pair].double()
            real = states_BHTD[:, :, position, pair].double()
            imaginary = states_BHTD[:, :, position, pair + half].double()
            turned[:, :, position, pair] = real * cos - imaginary * sin
            turned[:, :, position, pair + half] = real * sin + imaginary * cos
    return turned


def attention(
    queries_BHTD: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    start_position: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slopes: list[float] | None = None,
) -> Tensor:
    """Compute each head and query by itself, over the list of keys that it may see.

    `slopes` has one number per head: what a key loses for each position of distance.
    """
    num_batch, num_heads, num_queries, _ = queries_BHTD.shape
    heads_per_group = num_heads // keys_BGSD.shape[1]
    result = torch.zeros(*queries_BHTD.shape[:3], values_BGSD.shape[-1], dtype=torch.float64)
    for batch in range(num_batch):
        for head in range(num_heads):
            keys_SD = keys_BGSD[batch, head // heads_per_group].double()
            values_SD = values_BGSD[batch, head // heads_per_group].double()
            for index in range(num_queries):
                position = start_position + index
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                query_D = queries_BHTD[batch, head, index].double()
                scores_S = keys_SD[first : position + 1] @ query_D * scale
                if softcap is not None:
                    scores_S = torch.tanh(scores_S / softcap) * softcap
                if slopes is not None:
                    distances_S = position - torch.arange(first, position + 1).double()
                    scores_S = scores_S - slopes[head] * distances_S
                weights_S = torch.exp(scores_S - scores_S.max())
                weights_S = weights_S / weights_S.sum()
                result[batch, head, index] = weights_S @ values_SD[first : position + 1]
    return result


def paged_attention(
    queries_NHD: Tensor,
    pages_PCGSW: Tensor,
    tables_NM: Tensor,
    lengths_N: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather each token's keys and values by its table of pages, and attend over them."""
    result_NHD = torch.zeros(queries_NHD.shape, dtype=torch.float64)
    for index, (query_HD, length) in enumerate(zip(queries_NHD, lengths_N.tolist(), strict=True)):
        if length == 0:
            continue
        pages_CGSW = [pages_PCGSW[page] for page in tables_NM[index]]
        states_CGSD = torch.cat(pages_CGSW, dim=2)[:, :, :length]
        head_dim = query_HD.shape[-1]
        if states_CGSD.dtype is torch.int8:
            states_CGSD = dequantize_kv(states_CGSD, head_dim, torch.float32)
        states_CGSD = states_CGSD[..., :head_dim]
        result_NHD[index] = attention(
            query_HD[None, :, None], states_CGSD[:1], states_CGSD[1:], length - 1,
            scale=scale, sliding_window=sliding_window, softcap=softcap,
        )[0, :, 0]  # fmt: skip
    return result_NHD


def paged_prompt_attention(
    queries_NHD: Tensor, pages_PCGSW: Tensor, tables_XM: Tensor, rows_X3: Tensor, **options: Any
) -> Tensor:
    """Attend with each token of each row as if it had been generated; NaN for tokens of no row."""
    result_NHD = torch.full(queries_NHD.shape, torch.nan, dtype=torch.float64)
    for table_M, (first, num_tokens, position) in zip(tables_XM, rows_X3.tolist(), strict=True):
        tokens = slice(first, first + num_tokens)
        result_NHD[tokens] = paged_attention(
            queries_NHD[tokens], pages_PCGSW, table_M.expand(num_tokens, -1),
            position + 1 + torch.arange(num_tokens), **options,
        )  # fmt: skip
    return result_NHD


def round_state(state_D: Tensor) -> tuple[float, list[int]]:
    """Return the scale and the numbers by which an int8 cache keeps one key or value."""
    if not state_D.isfinite().all():
        return float("nan"), [0] * len(state_D)
    largest = state_D.float().abs().max()
    if largest < 1e-30:
        return 0.0, [0] * len(state_D)
    factor = torch.tensor(127.0) / largest
    return float(largest / 127.0), [round(float(number * factor)) for number in state_D.float()]


def make_int8_weight(in_features: int, out_features: int) -> Int8Weight:
    draw = torch.Generator().manual_seed(5)
    values = torch.randint(-128, 128, (out_features, in_features), generator=draw)
    return Int8Weight(values.to(torch.int8), torch.rand(out_features, generator=draw) + 0.01)


def make_rows(num_rows: int, in_features: int, seed: int = 6) -> Tensor:
    """Return rows of which each is larger than the one before."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, in_features, generator=draw)
    return rows * torch.logspace(-3, 3, num_rows)[:, None]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compare exactly; all NaN are the same, and so are both zeros."""
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0.0, atol=0.0, equal_nan=True)
