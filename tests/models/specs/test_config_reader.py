"""Values of a `config.json`, which anybody may have written, and its rotations and windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.models.specs.config_reader import (
    ConfigReader,
    cover_whole_heads,
    limit_to_exact_positions,
    read_common_fields,
    read_one_window,
    read_rope_parameters,
    read_typed_windows,
)
from shoal.protocol.errors import ModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda reader: reader.count("x", 8), 0),
        (lambda reader: reader.count("x", 8), 9),
        (lambda reader: reader.count("x", 8), True),
        (lambda reader: reader.count("x", 8), 2.0),
        (lambda reader: reader.count("x", 8), None),
        (lambda reader: reader.number("x", 1.0), -1.0),
        (lambda reader: reader.number("x", 1.0), float("nan")),
        (lambda reader: reader.number("x", 1.0), 1e31),
        (lambda reader: reader.number("x", 1.0), "1"),
        (lambda reader: reader.flag("x", False), 1),
        (lambda reader: reader.text("x", ""), ["a"]),
        (lambda reader: reader.texts("x"), ["a", 1]),
        (lambda reader: reader.indices("x"), {"0": 1}),
        (lambda reader: reader.mapping("x"), [1]),
    ],
)
def test_value_of_another_type_or_out_of_bounds_is_refused_by_its_name(
    read: Callable[[ConfigReader], object], value: object
) -> None:
    with pytest.raises(ModelError, match=r"config\.json.* x"):
        read(ConfigReader({"x": value}))


def test_null_is_a_missing_value_but_for_numbers_that_may_be_none() -> None:
    reader = ConfigReader({"x": None})

    assert not reader.has("x")
    assert reader.count("x", 8, default=3) == 3
    assert (reader.flag("x", True), reader.text("x", "a")) == (True, "a")
    assert (reader.texts("x"), reader.indices("x"), reader.mapping("x")) == ([], frozenset(), {})
    assert reader.number_or_none("x", 2.0) is None
    assert reader.number_or_none("y", 2.0) == 2.0
    assert reader.number_or_none("y", None) is None


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
    ],
)
def test_dtype_has_the_name_of_transformers_5_or_4(
    config: dict[str, object], dtype: torch.dtype
) -> None:
    assert ConfigReader(config).dtype() is dtype


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="'float8' is not one of float32, bfloat16, float16"):
        ConfigReader({"dtype": "float8"}).dtype()


def test_heads_of_their_own_size_need_not_divide_the_hidden_states() -> None:
    fields = read_common_fields(LLAMA)
    assert (fields["head_dim"], fields["num_kv_heads"]) == (16, 4)

    with pytest.raises(ModelError, match="hidden_size 64 is no multiple of 5 heads"):
        read_common_fields({**LLAMA, "num_attention_heads": 5})
    wide = read_common_fields({**LLAMA, "num_attention_heads": 5, "head_dim": 32})
    assert wide["head_dim"] == 32


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rotations_of_transformers_4_are_spelled_as_in_5(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert dict(read_rope_parameters(config)) == expected


def test_rotations_that_differ_by_block_are_refused() -> None:
    with pytest.raises(ModelError, match="differ by block"):
        read_rope_parameters({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}})


def test_rotation_covers_whole_heads_unless_it_is_scaled() -> None:
    partial = {"partial_rotary_factor": 0.5}
    plain = {"rope_type": "default", **partial}
    scaled = {"rope_type": "yarn", **partial}

    assert dict(cover_whole_heads(plain)) == {"rope_type": "default"}
    assert dict(cover_whole_heads(scaled)) == scaled


def test_long_rotation_is_served_up_to_the_length_of_the_pretraining() -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 64}

    rope, max_positions = limit_to_exact_positions(long, 256)

    assert (rope["factor"], max_positions) == (4.0, 64)
    assert limit_to_exact_positions({"rope_type": "default"}, 256)[1] == 256


def test_window_is_for_all_blocks_or_those_that_layer_types_name() -> None:
    assert read_one_window({}, 2, default=8) == (8, 8)
    assert read_one_window({"sliding_window": None}, 2, default=8) == (None, None)
    assert read_one_window({"sliding_window": 4}, 2, default=None) == (4, 4)
    types = ["full_attention", "sliding_attention"]
    assert read_typed_windows({"layer_types": types}, 8, []) == (None, 8)
    assert read_typed_windows({"sliding_window": 4}, 8, types) == (None, 4)

    with pytest.raises(ModelError, match="layer_types may only hold"):
        read_typed_windows({"layer_types": ["linear_attention"]}, 8, [])
    with pytest.raises(ModelError, match="sliding_window is null"):
        read_typed_windows({"layer_types": types, "sliding_window": None}, 8, [])
