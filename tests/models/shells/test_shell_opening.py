"""What opening a shell finds out about its blocks."""

import pytest

from shoal.models.shells.shell_opening import open_shell
from shoal.models.shells.step_cache import CacheShape

CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 13,
}


@pytest.mark.parametrize("large", [0, 3])
def test_cache_has_room_for_the_only_block_with_large_heads(large: int) -> None:
    kinds = ["full_attention"] * 6
    kinds[large] = "sliding_attention"

    shape = open_shell({**CONFIG, "layer_types": kinds}).cache_shape

    assert 2 * shape.num_heads * shape.head_dim == 2 * 4 * 32


def test_shells_that_are_opened_again_are_equal_and_apart() -> None:
    config = {**CONFIG, "model_type": "granite", "num_key_value_heads": 2, "head_dim": 16}

    first, second = open_shell(config), open_shell(config)

    assert first.cache_shape == second.cache_shape == CacheShape(2, 16)
    assert first.positions_name == second.positions_name
    assert not set(first.model.modules()) & set(second.model.modules())
