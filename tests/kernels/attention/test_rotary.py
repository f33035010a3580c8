"""Rotary tables against transformers' own, and the rotation against complex numbers."""

from typing import Any

import kernel_reference as reference
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from shoal.kernels.attention.rotary import RotaryTable, apply_rotary

DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
SCALINGS: list[dict[str, Any]] = [
    DEFAULT,
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 512},
    YARN,
    YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    YARN | {"rope_theta": 1e6, "factor": 1.0, "original_max_position_embeddings": 32768},
]


def make_config(parameters: dict[str, Any], head_dim: int, max_positions: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
        max_position_embeddings=max_positions, rope_parameters=dict(parameters),
    )  # fmt: skip


@pytest.mark.parametrize("parameters", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_table_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    max_positions = 4096
    table = RotaryTable.build(head_dim, max_positions, parameters)
    theirs = LlamaRotaryEmbedding(make_config(parameters, head_dim, max_positions))
    positions = torch.tensor([[0, 1, 2, 17, 1023, 2048, max_positions - 1]])

    expected_cos, expected_sin = theirs(torch.zeros(1), positions)

    table.rows(0, max_positions)
    torch.testing.assert_close(table.cos_TD[positions[0]], expected_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin_TD[positions[0]], expected_sin[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("parameters", [p for p in SCALINGS if p["rope_type"] != "default"])
def test_partial_table_equals_transformers_frequencies(parameters: dict[str, Any]) -> None:
    parameters = parameters | {"partial_rotary_factor": 0.5}
    config = make_config(parameters, 64, 4096)
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))

    table = RotaryTable.build(64, 4096, parameters)

    assert table.cos_TD.shape[1] == 32
    angles = frequencies.repeat(2) * 3.0
    torch.testing.assert_close(table.rows(3, 1)[0][0], angles.cos() * factor, rtol=0, atol=1e-6)


def test_table_grows_without_changing_earlier_rows() -> None:
    table = RotaryTable.build(16, 10_000, LLAMA3)
    before, _ = table.rows(5, 3)
    size_before = len(table.cos_TD)

    late_cos, late_sin = table.rows(9_990, 10)

    whole = RotaryTable.build(16, 10_000, LLAMA3).rows(0, 10_000)
    assert size_before < 10_000
    assert torch.equal(before, whole[0][5:8])
    assert torch.equal(late_cos, whole[0][9_990:])
    assert torch.equal(late_sin, whole[1][9_990:])


@pytest.mark.parametrize(("start", "count"), [(0, 33), (32, 1), (-1, 2), (4, -2)])
def test_table_refuses_positions_outside(start: int, count: int) -> None:
    table = RotaryTable.build(16, 32, DEFAULT)

    with pytest.raises(ValueError, match="outside 0:32"):
        table.rows(start, count)


def test_dynamic_scaling_is_plain_within_the_pretraining_length_and_refused_beyond() -> None:
    dynamic = DEFAULT | {"rope_type": "dynamic", "factor": 2.0}
    dynamic["original_max_position_embeddings"] = 64

    assert torch.equal(
        RotaryTable.build(16, 64, dynamic).cos_TD, RotaryTable.build(16, 64, DEFAULT).cos_TD
    )
    with pytest.raises(ValueError, match="dynamic rope scaling"):
        RotaryTable.build(16, 65, dynamic)


@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_long_scaling_equals_transformers_within_the_pretraining_length(
    attention_factor: float | None,
) -> None:
    parameters = DEFAULT | {
        "rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 8.0,
        "short_factor": [1.0 + pair / 5 for pair in range(8)], "long_factor": [4.0] * 8,
        "attention_factor": attention_factor,
    }  # fmt: skip
    theirs = LlamaRotaryEmbedding(make_config(parameters, 16, 512))

    cos, sin = RotaryTable.build(16, 64, parameters).rows(0, 64)

    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="long rope scaling"):
        RotaryTable.build(16, 65, parameters)
    with pytest.raises(ValueError, match="short_factor must be a list of 8 numbers"):
        RotaryTable.build(16, 64, parameters | {"short_factor": [1.0]})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": None}, "None"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"factor": 0}, "factor"),
        ({"factor": None}, "factor"),
        ({"low_freq_factor": 4.0}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.01}, "rotate 0"),
    ],
)
def test_table_refuses_bad_parameters(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RotaryTable.build(16, 32, LLAMA3 | change)


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        (DEFAULT | {"rope_theta": 10**400}, "rope_theta must be a positive number"),
        (DEFAULT | {"rope_theta": 1e-20, "partial_rotary_factor": 1.0}, None),
        (DEFAULT | {"partial_rotary_factor": float("inf")}, "partial_rotary_factor must be"),
        (YARN | {"rope_theta": 1.0}, "cannot be computed with: float division by zero"),
        (YARN | {"attention_factor": float("inf")}, "attention_factor must be a positive number"),
        (YARN | {"factor": 1e-38, "beta_fast": 1e20, "beta_slow": 1e-20}, "not finite"),
    ],
)
def test_table_has_finite_numbers_or_is_refused(
    parameters: dict[str, Any], complaint: str | None
) -> None:
    if complaint is None:
        assert RotaryTable.build(16, 4096, parameters).rows(4095, 1)[0].isfinite().all()
        return
    with pytest.raises(ValueError, match=complaint):
        RotaryTable.build(16, 4096, parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("count", [1, 6])
def test_rotation_matches_the_reference(count: int, partial: float, dtype: torch.dtype) -> None:
    states = torch.randn(2, 3, count, 16, generator=torch.Generator().manual_seed(6)).to(dtype)
    table = RotaryTable.build(16, 64, YARN | {"partial_rotary_factor": partial})

    result = apply_rotary(states, *table.rows(7, count))

    expected = reference.apply_rotary(states, *table.rows(7, count))
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_rotation_equals_llama() -> None:
    states = torch.randn(1, 4, 9, 32, generator=torch.Generator().manual_seed(7))
    cos, sin = RotaryTable.build(32, 64, DEFAULT).rows(11, 9)

    expected, _ = apply_rotary_pos_emb(states, states, cos[None], sin[None])

    torch.testing.assert_close(apply_rotary(states, cos, sin), expected, rtol=0, atol=1e-6)
