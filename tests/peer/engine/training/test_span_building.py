"""First weights: drawn as transformers draws them, for every family and in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_runs import MODEL, describe_run
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.models.shells.shell_opening import open_shell
from shoal.peer.engine.training.optimizers import SpanOptimizer
from shoal.peer.engine.training.span_building import build_span, list_weights
from shoal.protocol.errors import ModelError
from shoal.protocol.runs.training_run import Optimizer, read_run
from shoal.protocol.spans import Span

EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Scales some weights of modules that have none of their own, by the number of blocks.
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 96,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": MODEL,
    "gemma2": MODEL | {"head_dim": 8},
    "qwen3_moe": MODEL | EXPERTS,
    # Has buffers that are in its checkpoints.
    "glm4_moe": MODEL | EXPERTS,
    # Has weights that are not trained.
    "afmoe": MODEL | EXPERTS | {"num_dense_layers": 0, "head_dim": 8},
}


WHOLE = Span(0, 2)


def build(model_type: str, span: Span = WHOLE) -> dict[str, torch.Tensor]:
    modules = build_span(read_run(describe_run(model=describe(model_type))), span)
    trained = {name: weight.detach() for name, weight in modules.parameters.items()}
    return trained | modules.constants


def describe(model_type: str) -> dict[str, Any]:
    return FAMILIES[model_type] | {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_first_weights_are_distributed_as_those_of_transformers(model_type: str) -> None:
    weights = build(model_type)

    config = CONFIG_MAPPING[model_type].from_dict(describe(model_type))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = AutoModelForCausalLM.from_config(config).state_dict()

    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        other = expected[name]
        assert weight.shape == other.shape
        # Of four standard errors, of both; ones and zeros have none.
        error = 4 * float(other.std()) * (2 / weight.numel()) ** 0.5
        assert float(weight.mean()) == pytest.approx(float(other.mean()), abs=error + 1e-6), name
        assert float(weight.std()) == pytest.approx(float(other.std()), abs=error + 1e-6), name


def test_residual_projections_of_gpt2_begin_smaller() -> None:
    weights = build("gpt2")

    for name in ("attn.c_proj", "mlp.c_proj"):
        # One over the square root of two per block, of two blocks.
        std = float(weights[f"transformer.h.0.{name}.weight"].std())
        assert std == pytest.approx(0.05, rel=0.03)
    assert float(weights["transformer.h.0.mlp.c_fc.weight"].std()) == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("model_type", ["gpt2", "glm4_moe"])
def test_each_layout_begins_with_the_same_weights(model_type: str) -> None:
    torch.manual_seed(1)
    whole = build(model_type)
    torch.manual_seed(2)

    first, last = (build(model_type, span) for span in (Span(0, 1), Span(1, 2)))

    assert not first.keys() & last.keys()
    assert whole.keys() == first.keys() | last.keys()
    assert all(torch.equal(whole[name], weight) for name, weight in (first | last).items())


@pytest.mark.parametrize("model_type", ["gpt2", "glm4_moe", "afmoe"])
def test_weights_are_known_without_their_memory(model_type: str) -> None:
    run = read_run(describe_run(model=describe(model_type) | {"dtype": "bfloat16"}))
    for span in (Span(0, 1), Span(1, 2), WHOLE):
        modules = build_span(run, span)
        weights = {**modules.parameters, **modules.constants}
        known = list_weights(open_shell(run.model), span)
        assert {name: (one.shape, one.dtype) for name, one in weights.items()} == {
            name: (one.shape, one.dtype) for name, one in known.items()
        }
        assert all(one.is_meta for one in known.values())


def test_weights_without_initial_values_are_named() -> None:
    model = MODEL | {"model_type": "apertus"}

    with pytest.raises(ModelError, match=r"'apertus' cannot be .* model.layers.0.mlp.act_fn.alpha"):
        build_span(read_run(describe_run(model=model)), WHOLE)


def test_weights_that_transformers_does_not_train_are_constants() -> None:
    modules = build_span(read_run(describe_run(model=describe("afmoe"))), WHOLE)

    assert "model.layers.0.mlp.expert_bias" in modules.constants
    assert all(weight.requires_grad for weight in modules.parameters.values())
    assert not any(tensor.requires_grad for tensor in modules.constants.values())


def test_muon_takes_experts_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    start, gradient = torch.randn(2, 3, 8, 6, generator=generator)
    experts = torch.nn.Parameter(start.clone())
    config = Optimizer(learning_rate=0.1, weight_decay=0.1)
    stacked = SpanOptimizer(config, {"layers.0.experts": experts})
    stacked.step({"layers.0.experts": gradient}, 1.0)

    for index in range(3):
        matrix = torch.nn.Parameter(start[index].clone())
        SpanOptimizer(config, {"layers.0.up": matrix}).step({"layers.0.up": gradient[index]}, 1.0)
        assert torch.equal(experts[index], matrix)
    assert list(stacked.read_state()) == ["layers.0.experts/momentum_buffer"]
