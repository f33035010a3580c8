"""The blocks of every family compute what transformers computes from the same checkpoint."""

import json
import math

import pytest
import torch
from pass_scene import load_engine, share_engine
from transformers import AutoConfig

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.families.registry import FAMILIES
from shoal.models.spec_reader import read_spec
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import ModelError, UsageError
from shoal.protocol.spans import Span

TOLERANCE = 1e-4


def draw_tokens(tiny_model, num_rows: int, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_tokens)
    vocabulary = tiny_model.reference.config.vocab_size
    return torch.randint(0, vocabulary, (num_rows, num_tokens), generator=generator)


def run_engines(
    engines: list[Engine], hidden: torch.Tensor, cuts: list[int], spans: list[Span] | None = None
) -> torch.Tensor:
    """Stream hidden states through the engines, or a span of each, in steps that end at `cuts`.

    A step of one token is a generated one.
    """
    num_rows, num_tokens, _ = hidden.shape
    spans = spans or [engine.span for engine in engines]
    caches = [
        engine.pool.open(num_rows, num_tokens, span)
        for engine, span in zip(engines, spans, strict=True)
    ]
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        step = hidden[:, start:stop]
        for engine, cache in zip(engines, caches, strict=True):
            work = StepWork(cache, start, step, decoded=stop - start == 1)
            (step,) = engine.execute([work])
            assert isinstance(step, torch.Tensor), step
        outputs.append(step)
    for cache in caches:
        cache.close()
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def check_equal_to_transformers(tiny_model, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
    """Compare final hidden states, before the head's norm by way of the norm, and logits."""
    head = tiny_model.reference.get_output_embeddings()
    expected = tiny_model.decoder(tokens).last_hidden_state
    normed = tiny_model.final_norm(hidden)
    torch.testing.assert_close(normed, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(head(normed), head(expected), rtol=TOLERANCE, atol=TOLERANCE)


def test_every_family_has_a_variant_in_conftest(compared_families: set[str]) -> None:
    assert set(FAMILIES) <= compared_families


def test_one_step_equals_transformers(any_tiny_model) -> None:
    engine = share_engine(any_tiny_model)
    for num_rows, num_tokens in ((1, 1), (3, 2), (3, 17)):
        tokens = draw_tokens(any_tiny_model, num_rows, num_tokens)

        output = run_engines([engine], any_tiny_model.embed(tokens), cuts=[])

        check_equal_to_transformers(any_tiny_model, tokens, output)


def test_four_engines_equal_transformers_after_every_block(one_of_family) -> None:
    tokens = draw_tokens(one_of_family, 2, 40)
    with torch.no_grad():
        expected = one_of_family.decoder(tokens, output_hidden_states=True).hidden_states
    engines = [share_engine(one_of_family, span=Span(i, i + 1)) for i in range(4)]

    hidden = expected[0]
    for engine, after in zip(engines[:3], expected[1:], strict=False):
        hidden = run_engines([engine], hidden, cuts=[])
        torch.testing.assert_close(hidden, after, rtol=0, atol=TOLERANCE)
    check_equal_to_transformers(one_of_family, tokens, run_engines(engines[3:], hidden, cuts=[]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "cuts"),
    [(300, [100, 101, 128, 256]), (60, [*range(1, 17), *range(37, 60)])],
    ids=["chunks", "tokens-prompt-tokens"],
)
def test_steps_of_any_length_equal_transformers(
    any_tiny_model, num_tokens: int, cuts: list[int]
) -> None:
    tokens = draw_tokens(any_tiny_model, 2, num_tokens)
    hidden = any_tiny_model.embed(tokens)
    engine = share_engine(any_tiny_model)

    output = run_engines([engine] * 2, hidden, cuts, [Span(0, 3), Span(3, 4)])

    check_equal_to_transformers(any_tiny_model, tokens, output)


def read_config(tiny_model) -> dict:
    return json.loads((tiny_model.directory / "config.json").read_text())


@pytest.mark.parametrize("variant", ["llama", "llama-rope-linear", "llama-rope-llama3"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_configs_of_transformers_4_read_like_those_of_5(tiny_models, variant, key) -> None:
    config = read_config(tiny_models.get(variant))
    scaling = dict(config.pop("rope_parameters"))
    old = {**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": None}
    if variant != "llama":
        old["rope_scaling"] = {**scaling, key: scaling["rope_type"]}
        if key == "type":
            del old["rope_scaling"]["rope_type"]

    assert read_spec(old) == read_spec(read_config(tiny_models.get(variant)))


MINIMAL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "vocab_size": 128,
}
SLIDING = {"use_sliding_window": True}
NEO = {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 15]], "num_heads": 8}


@pytest.mark.parametrize(
    ("family", "optional"),
    [
        *((family, {}) for family in sorted(FAMILIES)),
        ("gemma", {"hidden_act": "gelu"}),  # of the first releases, which mean the other one
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}),
    ],
)
def test_what_a_config_leaves_out_is_read_as_in_transformers(family: str, optional: dict) -> None:
    spec = FAMILIES[family]({"model_type": family, **MINIMAL, **optional})
    expected = AutoConfig.for_model(family, **MINIMAL, **optional)

    assert spec.head_dim == (getattr(expected, "head_dim", None) or 64 // 8)
    assert spec.norm_eps == read_any(expected, "rms_norm_eps", "layer_norm_epsilon")
    # BLOOM's is not in its configuration.
    assert family == "bloom" or spec.activation == read_any(
        expected, "hidden_act", "hidden_activation", "activation", "activation_function"
    )
    assert spec.tie_word_embeddings == expected.tie_word_embeddings
    assert spec.client.logit_softcap == getattr(expected, "final_logit_softcapping", None)
    assert list(spec.ropes) == read_ropes(expected)
    window = getattr(expected, "sliding_window", None)
    layer_types = getattr(expected, "layer_types", None) or ["sliding_attention"] * spec.num_blocks
    expected_windows = [
        window if layer_type == "sliding_attention" else None for layer_type in layer_types
    ]
    assert list(spec.sliding_windows) == expected_windows


def read_any(config, *names: str):
    """Return the value of whichever name this family has."""
    return next(getattr(config, name) for name in names if hasattr(config, name))


def read_ropes(config) -> list[dict]:
    """Return the rotations of a transformers configuration: none, one, or full and local."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or getattr(config, "alibi", False):
        return []
    if "full_attention" in parameters:
        return [parameters["full_attention"], parameters["sliding_attention"]]
    return [parameters]


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_scaling_without_an_original_length_starts_from_the_whole(rope_type: str) -> None:
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": rope_type, "rope_theta": 1e4, **factors}

    spec = read_spec({"model_type": "llama", **MINIMAL, "rope_parameters": scaling})
    expected = AutoConfig.for_model("llama", **MINIMAL, rope_parameters=dict(scaling))

    assert list(spec.ropes) == [expected.rope_parameters]


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "longrope"])
@pytest.mark.parametrize("nested", [{}, {"original_max_position_embeddings": 256}])
def test_original_length_beside_the_rotation_counts_more(rope_type: str, nested: dict) -> None:
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors |= {"short_factor": [1.5] * 4, "long_factor": [4.0] * 4}
    scaling = {"rope_type": rope_type, "rope_theta": 1e4, **factors, **nested}
    config = {**MINIMAL, "original_max_position_embeddings": 128}

    spec = read_spec({"model_type": "llama", **config, "rope_parameters": scaling})
    expected = AutoConfig.for_model("llama", **config, rope_parameters=dict(scaling))
    expected.standardize_rope_params()  # as every rotation does before it is computed

    assert expected.rope_parameters["original_max_position_embeddings"] == 128
    assert list(spec.ropes) == [expected.rope_parameters]
    assert spec.max_positions == (128 if rope_type == "longrope" else 512)


@pytest.mark.parametrize("family", ["falcon", "gemma2", "gemma3_text", "llama", "qwen3_moe"])
def test_only_phi_3_rotates_a_part_of_a_head_where_nothing_is_scaled(family: str) -> None:
    config = {**MINIMAL, "partial_rotary_factor": 0.5}
    phi3 = read_spec({"model_type": "phi3", **config})
    linear = read_spec(
        {"model_type": "llama", **config, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )

    spec = read_spec({"model_type": family, **config})

    assert all("partial_rotary_factor" not in rope for rope in spec.ropes)
    assert [rope["partial_rotary_factor"] for rope in (*phi3.ropes, *linear.ropes)] == [0.5, 0.5]


def test_original_length_beside_two_rotations_is_that_of_neither() -> None:
    ropes = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {**MINIMAL, "original_max_position_embeddings": 128, "rope_parameters": ropes}
    spec = read_spec({"model_type": "gemma3_text", **config})

    assert list(spec.ropes) == read_ropes(AutoConfig.for_model("gemma3_text", **config))


def test_published_dtype_is_read_in_both_spellings() -> None:
    config = {"model_type": "llama", **MINIMAL}

    assert read_spec({**config, "torch_dtype": "bfloat16"}).dtype is torch.bfloat16
    assert read_spec({**config, "dtype": "float16"}).dtype is torch.float16


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "config.json has no model_type"),
        ({"model_type": 3}, "model_type must be a string, got 3"),
        ({"model_type": "nonsense"}, "'nonsense' are not supported: transformers does not know it"),
        ({"model_type": "nonsense"}, "; supported are bloom, falcon, .*, qwen3_moe, and others"),
        ({"model_type": "mamba"}, "its blocks (do not cache|cache more than) keys and values"),
        (
            {"model_type": "opt", "do_layer_norm_before": False},
            "not a list of blocks between an embedding and a norm",
        ),
        (
            {"model_type": "opt", "word_embed_proj_dim": 32},
            "its embedding or head is of another size than its hidden states",
        ),
        ({"model_type": "ctrl"}, "its decoder changes hidden states outside its blocks"),
        ({"model_type": "nanochat"}, "its final norm does not run once, after its blocks"),
        ({"model_type": "whisper"}, "its decoder attends to an encoder"),
        ({"model_type": "llama4"}, "its text model of type 'llama4_text' is only a part of it"),
        ({"model_type": "stablelm", "num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({**NEO, "num_layers": 10**9}, "num_layers must be at most 4096, got 1000000000"),
        ({"model_type": "stablelm", "num_labels": 10**9}, "num_labels must be at most 65536"),
        ({"model_type": "stablelm", "quantization_config": {"bits": 4}}, "quantized already"),
        (
            {"model_type": "stablelm", "hidden_act": "tan"},
            "cannot build a model of type 'stablelm' from this config.json: KeyError: 'tan'; check",
        ),
        (
            {"model_type": "stablelm", "num_attention_heads": 3},
            r"ValueError: hidden_size must be divisible by num_heads \(.*\); check its values",
        ),
        (
            {"model_type": "stablelm", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",
        ),
        ({"model_type": "stablelm", "num_key_value_heads": 0}, "heads must be at least 1, got 0"),
        ({"model_type": "stablelm", "attention_dropout": 1.5}, "_dropout must be from 0 to 1, got"),
        ({"model_type": "stablelm", "layer_norm_eps": math.nan}, "_eps must be a finite number"),
        (
            {"model_type": "stablelm", "pad_token_id": 500},
            "cannot build a model of type 'stablelm'",
        ),
        ({"model_type": "cpmant"}, "not a list of blocks between an embedding and a norm"),
        ({"model_type": "gptj", "rotary_dim": 7}, "its blocks cannot run one by one"),
        (
            {"model_type": "gptj", "rotary_dim": 8, "max_position_embeddings": 10**8},
            # These of transformers 5.24 are in the decoder.
            "its blocks have buffers that are larger|it has buffers of more than 256 MiB",
        ),
        (
            {**NEO, "max_position_embeddings": 2**13},
            "its blocks have buffers that are larger than their weights",
        ),
        (
            {**NEO, "attention_types": [[["global", "local"], 10**10]]},
            "attention_types must be at most 16777216, got 10000000000",
        ),
        (
            {"model_type": "gpt_bigcode", "max_position_embeddings": 10**6},
            "it has buffers of more than 256 MiB",
        ),
        ({"model_type": "zaya"}, "it has weights outside its blocks, embedding, positions"),
        ({"model_type": "deepseek_v32"}, "its blocks cache more than keys and values; supported"),
        ({"model_type": "jamba"}, "its blocks cache more than keys and values; supported are"),
    ],
)
def test_a_family_that_cannot_be_wrapped_is_refused(config: dict, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_spec({**MINIMAL, **config} if config else config)


def test_wrapped_blocks_need_float_weights(tiny_models) -> None:
    tiny_model = tiny_models.get("wrapped-stablelm")

    with pytest.raises(UsageError, match=r"'stablelm' .* needs float weights; use --weights bf16"):
        load_engine(tiny_model, WeightFormat.INT8)
    engine = load_engine(tiny_model, WeightFormat.BF16, Span(0, 1))
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))

    assert run_engines([engine], hidden, cuts=[2]).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_replay_in_wrapped_blocks_is_exact(tiny_models) -> None:
    engine = share_engine(tiny_models.get("wrapped-stablelm"))
    hidden = torch.randn(1, 90, 64, generator=torch.Generator().manual_seed(1))
    prompt, decoded = hidden[:, :70], hidden[:, 70:]
    outputs = []
    for step in [[decoded], decoded.split(1, dim=1)]:
        cache = engine.pool.open(1, 90, engine.span)
        engine.execute([StepWork(cache, 0, prompt)])
        parts = []
        for part in step:
            work = StepWork(cache, cache.length, part, decoded=True)
            (output,) = engine.execute([work])
            assert isinstance(output, torch.Tensor), output
            parts.append(output)
        cache.close()
        outputs.append(torch.cat(parts, dim=1))

    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("llama", {"hidden_size": None}, "has no hidden_size"),
        ("llama", {"hidden_size": 0}, "hidden_size must be a whole number"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be a whole number"),
        ("llama", {"hidden_size": 2**40}, "hidden_size must be a whole number"),
        ("llama", {"hidden_size": 65}, "no multiple of 8 heads"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ("llama", {"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
        ("llama", {"head_dim": 7}, "head_dim must be even"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ("llama", {"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ("llama", {"rope_scaling": 3}, "rope_scaling must be an object"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differ by block"),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
        ("llama", {"hidden_act": "tan"}, "activation 'tan' is not supported"),
        ("llama", {"hidden_act": 1}, "hidden_act must be a string"),
        ("llama", {"dtype": "int4"}, "dtype 'int4' is not one of"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized already"),
        ("qwen2", {**SLIDING, "layer_types": "full_attention"}, "layer_types must be a list"),
        ("qwen2", {**SLIDING, "max_window_layers": "all"}, "not a block index"),
        ("qwen2", {**SLIDING, "sliding_window": -4}, "sliding_window must be a whole number"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "for BLOOM"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "2 needs new_decoder_architecture"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be a whole"),
        ("falcon", {"alibi": 1}, "alibi must be true or false"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is not supported"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": None}, "hidden_activation is null"),
        ("gemma3_text", {"hidden_activation": None}, "hidden_activation is null"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 30}, "layer_types may only hold"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole"),
        ("gemma3_text", {"rope_local_base_freq": "low"}, "rope_local_base_freq must be a positive"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 of 8 experts cannot be chosen"),
        ("qwen3_moe", {"mlp_only_layers": "first"}, "must be a list of block indices"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts must be a whole number"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "no rope_type 'linear'"),
        ("mistral", {"layer_types": ["full_attention"]}, "1 layer types for 30 blocks"),
        (
            "mistral",
            {"layer_types": ["sliding_attention"] * 30, "sliding_window": None},
            "sliding_window is null",
        ),
    ],
)
def test_what_a_family_cannot_use_is_refused_by_name(
    family: str, changes: dict, complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_spec({"model_type": family, **MINIMAL, **changes})


def test_gemma_3_of_transformers_4_reads_like_that_of_5() -> None:
    old = {"rope_theta": 5e4, "rope_local_base_freq": 5e2, "rope_scaling": {"rope_type": "linear"}}
    old["rope_scaling"]["factor"] = 8.0
    spec = FAMILIES["gemma3_text"]({"model_type": "gemma3_text", **MINIMAL, **old})

    expected = AutoConfig.for_model("gemma3_text", **MINIMAL, **old).rope_parameters
    assert list(spec.ropes) == [expected["full_attention"], expected["sliding_attention"]]
    assert [spec.find_rope(block) for block in range(7)] == [1, 1, 1, 1, 1, 0, 1]


def test_long_rotations_are_served_as_far_as_they_are_exact(tiny_models) -> None:
    engine = share_engine(tiny_models.get("phi3-longrope"), span=Span(0, 1))

    assert engine.spec.max_positions == 400
