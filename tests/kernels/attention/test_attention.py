"""Attention over a cache: reference, masks as transformers draws them, any cut into steps."""

import kernel_reference as reference
import pytest
import torch
from torch import Tensor
from transformers import MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import repeat_kv

from shoal.kernels.attention.alibi import Alibi
from shoal.kernels.attention.torch_attention import attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(
    heads: int,
    groups: int,
    start: int,
    count: int,
    dtype: torch.dtype,
    batch: int = 2,
    dim: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(8)
    queries = torch.randn(batch, heads, count, dim, generator=draw).to(dtype)
    # Views into a longer cache, as the engine passes them; what lies behind must not matter.
    cache = torch.randn(2, batch, groups, start + count + 5, dim, generator=draw).to(dtype)
    cache[:, :, :, start + count :] = float("nan")
    return queries, cache[0, :, :, : start + count], cache[1, :, :, : start + count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1), (1, 1)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (5, 1), (5, 4), (13, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_attention_matches_the_reference(
    heads: int, groups: int, start: int, count: int, window: int | None, dtype: torch.dtype
) -> None:
    queries, keys, values = make_case(heads, groups, start, count, dtype)

    result = attention(queries, keys, values, start, scale=0.3, sliding_window=window)

    expected = reference.attention(queries, keys, values, start, scale=0.3, sliding_window=window)
    assert result.dtype is dtype
    assert result.shape == queries.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (5, 1), (5, 4)])
@pytest.mark.parametrize("window", [None, 3])
def test_capped_and_biased_scores_match_the_reference(
    heads: int, groups: int, start: int, count: int, window: int | None, dtype: torch.dtype
) -> None:
    case = *make_case(heads, groups, start, count, dtype), start
    alibi = Alibi.build(heads)
    slopes = alibi.slopes_H.tolist()

    capped = attention(*case, scale=0.9, sliding_window=window, softcap=1.5)
    biased = attention(*case, scale=0.9, sliding_window=window, alibi=alibi)

    tolerance = TOLERANCE[dtype]
    expected = reference.attention(*case, scale=0.9, sliding_window=window, softcap=1.5)
    torch.testing.assert_close(capped.double(), expected, rtol=tolerance, atol=tolerance)
    expected = reference.attention(*case, scale=0.9, sliding_window=window, slopes=slopes)
    torch.testing.assert_close(biased.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (6, 3), (8, 1)])
def test_attention_equals_eager_attention_with_transformers_masks(
    start: int, count: int, window: int | None
) -> None:
    queries, keys, values = make_case(4, 2, start, count, torch.float32)
    config = MistralConfig(hidden_size=32, num_attention_heads=4, sliding_window=window)
    config._attn_implementation = "eager"
    # One pass over all positions; the rows of a later step are its last rows.
    draw_mask = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = draw_mask(
        config,
        torch.zeros(2, start + count, 32),
        None,  # the attention mask
        None,  # the cache, whose name depends on the release
        position_ids=torch.arange(start + count)[None].expand(2, -1),
    )

    assert isinstance(mask, Tensor)
    scores = queries @ repeat_kv(keys, 2).transpose(2, 3) * 0.25 + mask[:, :, start:]
    expected = scores.softmax(dim=-1) @ repeat_kv(values, 2)

    result = attention(queries, keys, values, start, scale=0.25, sliding_window=window)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 1, 6], [11, 1]])
def test_attention_does_not_depend_on_the_cut_into_steps(
    cuts: list[int], window: int | None, dtype: torch.dtype
) -> None:
    queries, keys, values = make_case(4, 2, 0, 12, dtype)
    whole = attention(queries, keys, values, 0, scale=0.3, sliding_window=window)

    start, parts = 0, []
    for count in cuts:
        stop = start + count
        step = queries[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
        parts.append(attention(*step, start, scale=0.3, sliding_window=window))
        start = stop

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 700])
def test_attention_of_several_query_blocks_equals_one_query_at_a_time(window: int | None) -> None:
    # 1030 queries are three blocks of 512; the positions probe the edges of each.
    queries, keys, values = make_case(2, 1, 20, 1030, torch.float32, batch=1, dim=4)

    result = attention(queries, keys, values, 20, scale=0.5, sliding_window=window)

    for index in (0, 511, 512, 1023, 1024, 1029):
        stop = 20 + index + 1
        one = queries[:, :, index : index + 1], keys[:, :, :stop], values[:, :, :stop]
        expected = reference.attention(*one, stop - 1, scale=0.5, sliding_window=window)
        torch.testing.assert_close(
            result[:, :, index : index + 1].double(), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    queries, keys, values = make_case(4, 2, 6, 1, dtype, batch=3)

    together = attention(queries, keys, values, 6, scale=0.3)

    for row in range(3):
        part = slice(row, row + 1)
        alone = attention(queries[part], keys[part], values[part], 6, scale=0.3)
        torch.testing.assert_close(together[part], alone, rtol=1e-6, atol=1e-6)


def test_attention_refuses_shapes_that_do_not_fit() -> None:
    queries, keys, values = make_case(4, 2, 3, 2, torch.float32)

    with pytest.raises(ValueError, match="do not fit"):
        attention(queries, keys, values, 4, scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attention(queries[:, :3], keys, values, 3, scale=1.0)
    with pytest.raises(ValueError, match="at least one position"):
        attention(queries, keys, values, 3, scale=1.0, sliding_window=0)
    with pytest.raises(ValueError, match="take a cap or linear biases"):
        attention(queries, keys, values, 3, scale=1.0, softcap=1.0, alibi=Alibi.build(4))
