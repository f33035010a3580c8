"""The shape of a model: which numbers fit together, and which tensors follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.kernels.layers.norm import NormKind
from shoal.models.specs.model_spec import (
    BlockTensorNames,
    ExpertsSpec,
    MlpKind,
    ModelSpec,
)
from shoal.protocol.errors import ModelError


def make_spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {
        "family": "llama", "hidden_size": 8, "num_blocks": 3, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 2, "intermediate_size": 16, "max_positions": 32, "dtype": torch.float32,
        "norm_eps": 1e-6, "rope_parameters": {"rope_type": "default"}, "vocab_size": 10,
        "tie_word_embeddings": False, "activation": "silu", "sliding_windows": (None,) * 3,
    }  # fmt: skip
    return ModelSpec(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_kv_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 3}, "head_dim must be even, got 3"),
        ({"activation": "tan"}, "activation 'tan' is not supported"),
        ({"sliding_windows": (None,)}, "1 layer types for 3 blocks"),
        ({"experts": ExpertsSpec(2, 3, 4, False)}, "3 of 2 experts cannot be chosen"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        make_spec(**changes)


def test_heads_of_odd_size_are_possible_without_rotations() -> None:
    spec = make_spec(head_dim=3, rope_parameters=None)

    assert (spec.ropes, spec.find_rope(0)) == ((), None)


def test_blocks_with_a_window_rotate_by_the_local_rotation() -> None:
    local = {"rope_type": "default", "rope_theta": 7.0}
    windows = (4, None, 4)

    one = make_spec(sliding_windows=windows)
    two = make_spec(sliding_windows=windows, local_rope_parameters=local)

    assert [one.find_rope(block) for block in range(3)] == [0, 0, 0]
    assert [two.find_rope(block) for block in range(3)] == [1, 0, 1]
    assert two.ropes[1] == local


def test_shapes_of_a_block_follow_from_its_numbers() -> None:
    assert make_spec().tensor_shapes() == {
        "query": (8, 8),
        "key": (4, 8),
        "value": (4, 8),
        "output": (8, 8),
        "attention_norm": (8,),
        "mlp_norm": (8,),
        "up": (16, 8),
        "gate": (16, 8),
        "down": (8, 16),
    }


def test_biases_norms_and_plain_mlps_change_the_tensors() -> None:
    spec = make_spec(
        has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_qk_norm=True,
        norm_kind=NormKind.LAYER, mlp=MlpKind.PLAIN,
    )  # fmt: skip

    more = {
        name: shape for name, shape in spec.tensor_shapes().items()
        if name not in make_spec().tensor_shapes()
    }  # fmt: skip

    assert more == {
        "query_bias": (8,),
        "key_bias": (4,),
        "value_bias": (4,),
        "output_bias": (8,),
        "query_norm": (2,),
        "key_norm": (2,),
        "attention_norm_bias": (8,),
        "mlp_norm_bias": (8,),
        "up_bias": (16,),
        "down_bias": (8,),
    }
    assert "gate" not in spec.tensor_shapes()


def test_block_of_experts_has_a_router_and_dense_blocks_have_an_mlp() -> None:
    spec = make_spec(experts=ExpertsSpec(5, 2, 6, True, dense_blocks=frozenset({1})))

    sparse, dense = spec.tensor_shapes(0), spec.tensor_shapes(1)

    assert [spec.has_experts(block) for block in range(3)] == [True, False, True]
    assert (sparse["router"], sparse["expert_up"], sparse["expert_down"]) == (
        (5, 8),
        (6, 8),
        (8, 6),
    )
    assert "up" not in sparse
    assert dense == make_spec().tensor_shapes()


def test_stored_names_are_those_of_every_prefix_and_spelling_in_order() -> None:
    names = BlockTensorNames(
        prefixes=("a.{block}.", "b.{block}."), names={"up": ("x.{expert}", "y"), "down": "z"}
    )

    assert names.list_stored(3, "up", 2) == ["a.3.x.2", "a.3.y", "b.3.x.2", "b.3.y"]
    assert names.list_stored(0, "down") == ["a.0.z", "b.0.z"]
