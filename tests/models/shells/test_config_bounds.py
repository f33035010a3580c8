"""Numbers of a config.json that nobody could count up to are refused, and no others."""

import pytest

from shoal.models.shells.shell_opening import check_bounds
from shoal.protocol.errors import ModelError


def test_numbers_of_real_models_pass() -> None:
    check_bounds(
        {
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144,
            "num_hidden_layers": 126,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 10_485_760,
            "model_max_length": 10**30,
            "rope_theta": 10**10,
            "layer_rope_theta": [10**7] * 64,
            "layer_norm_eps": 1e-5,
            "eos_token_id": [128_001, 128_008, 128_009],
            "forced_decoder_ids": [[1, 50_259], [2, 50_359]],
            "attention_types": [[["global", "local"], 12]],
            "layer_types": [["sliding_attention", 400]],
            "special_tokens": [["<|reserved|>", 128_000 + number] for number in range(256)],
            "rope_parameters": {"full_attention": {"rope_theta": 10**6, "long_factor": [1.5] * 48}},
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "num_parameters": 7 * 10**10,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "pad_token_id": None,
        }
    )


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_layers", 4097, "num_layers must be at most 4096, got 4097"),
        ("num_hidden_layers", 1e10, "num_hidden_layers must be at most 4096"),
        ("num_labels", 2**16 + 1, "num_labels must be at most 65536, got 65537"),
        ("first_k_dense_replace", 10**9, "first_k_dense_replace must be at most 16777216"),
        ("text", {"inner": {"n_layer": 10**6}}, "n_layer must be at most 4096"),
        ("counts", [1, 10**9], "counts must be at most 16777216"),
        (
            "attention_types",
            [[["a"] * 1000, 2**24]],
            "attention_types must repeat at most 16777216",
        ),
        (
            "attention_types",
            [[["a"], 2**23], [["a"], -(2**23)], [["a"], 2**23 + 1]],
            "not 16777217",
        ),
        ("attention_types", [["a" * 1000, 2**24]], "attention_types must repeat at most 16777216"),
    ],
)
def test_others_are_refused_by_name(field: str, value: object, complaint: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{complaint}"):
        check_bounds({field: value})
