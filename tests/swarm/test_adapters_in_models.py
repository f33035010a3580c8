"""An adapter that is active from now on is a part of its model: Trainer trains and saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import ONE_HOP, make_adapter, swarm_of
from transformers import Trainer, TrainingArguments

from shoal.client.training.lora import LoraAdapter
from shoal.protocol.errors import UsageError

PROMPT = "transformer.prompt_embeddings.weight"
TOKENS = torch.arange(60).view(3, 20) % 128


def list_trained(model: Any) -> list[torch.nn.Parameter]:
    return [matrix for matrix in model.parameters() if matrix.requires_grad]


def copy_of(adapter: LoraAdapter) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in adapter.state_dict().items()}


def assert_same(adapter: LoraAdapter, expected: dict[str, torch.Tensor]) -> None:
    assert adapter.state_dict().keys() == expected.keys()
    for name, value in adapter.state_dict().items():
        assert torch.equal(value, expected[name])


def test_model_has_the_parameters_of_the_adapter_that_is_active(tiny_models: Any) -> None:
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        first, second = make_adapter(model), make_adapter(model)
        with model.use_adapter(first):
            assert not list_trained(model)

        model.active_adapter = first
        assert set(list_trained(model)) == set(first.parameters())
        model(TOKENS, labels=TOKENS).loss.backward()
        model.zero_grad()
        assert all(matrix.grad is None for matrix in first.parameters())

        model.active_adapter = [first, second, None]
        assert set(list_trained(model)) == {*first.parameters(), *second.parameters()}
        model.active_adapter = None
        assert not list_trained(model)
        assert not model.state_dict()


def test_adapter_is_saved_with_its_model_and_found_again(tiny_models: Any, tmp_path: Path) -> None:
    tuned = {"tuning_mode": "ptune", "pre_seq_len": 3}
    with swarm_of(tiny_models, ONE_HOP, **tuned) as (_, model):
        model.active_adapter = adapter = make_adapter(model)
        expected, prompt = copy_of(adapter), model.get_parameter(PROMPT)
        model.save_pretrained(tmp_path)
        assert_same(LoraAdapter.load(tmp_path, model), expected)
        state = model.state_dict()
        model.active_adapter = other = LoraAdapter.create(model, rank=adapter.lora_config.rank)
        model.load_state_dict(state)
        assert_same(other, expected)
    with swarm_of(tiny_models, ONE_HOP, trained=tmp_path) as (_, opened):
        assert torch.equal(opened.get_parameter(PROMPT), prompt)
        assert opened.active_adapter is None


def test_adapter_of_a_with_is_saved_apart(tiny_models: Any, tmp_path: Path) -> None:
    tuned = {"tuning_mode": "ptune", "pre_seq_len": 3}
    with (
        swarm_of(tiny_models, ONE_HOP, **tuned) as (_, model),
        model.use_adapter(make_adapter(model)),
        pytest.warns(UserWarning, match=r"adapter is saved by its own save\(folder\)"),
    ):
        model.save_pretrained(tmp_path / "tuned")
    with (
        swarm_of(tiny_models, ONE_HOP) as (_, model),
        model.use_adapter(make_adapter(model)),
        pytest.raises(UsageError, match=r"adapter is saved by its own save\(folder\)"),
    ):
        model.save_pretrained(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_trainer_learns_an_adapter_and_goes_on_from_its_checkpoint(
    tiny_models: Any, tmp_path: Path
) -> None:
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]

    def train(seed: int, resume: str | None = None) -> tuple[list[Any], LoraAdapter]:
        with swarm_of(tiny_models, ONE_HOP) as (_, model):
            model.active_adapter = adapter = LoraAdapter.create(model, rank=2, seed=seed)
            arguments = TrainingArguments(
                str(tmp_path), max_steps=4, per_device_train_batch_size=3, save_steps=2,
                learning_rate=0.02, lr_scheduler_type="constant", logging_steps=1, report_to=[],
                use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows)  # pyright: ignore[reportArgumentType]
            trainer.train(resume_from_checkpoint=resume)
            return [entry for entry in trainer.state.log_history if "loss" in entry], adapter

    entries, expected = train(0)
    _, resumed = train(1, str(tmp_path / "checkpoint-2"))

    assert entries[3]["loss"] < 0.95 * entries[0]["loss"]
    assert all(entry["grad_norm"] > 0 for entry in entries)
    with swarm_of(tiny_models, ONE_HOP) as (_, model):
        saved = LoraAdapter.load(tmp_path / "checkpoint-4", model)
    assert_same(saved, copy_of(resumed))
    for name, value in expected.state_dict().items():
        assert torch.allclose(resumed.state_dict()[name], value, rtol=1e-4, atol=1e-6)
