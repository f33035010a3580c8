"""Prompts are trained through frozen remote blocks as through local ones, by everybody's tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainingArguments
from tuning_scene import (
    FOUR_HOPS,
    ONE_HOP,
    REPLICAS,
    LocalPromptTuning,
    assert_close,
    list_trained,
    make_batch,
    open_model,
    roughen,
)

from shoal.client.training.lora import LoraAdapter
from shoal.protocol.errors import UsageError

MODES = ("ptune", "deep_ptune")


def compute_losses(model: Any, forward: Any, num_steps: int) -> list[float]:
    """Train on the same batches; return the loss of each step."""
    optimizer = torch.optim.AdamW(list_trained(model), lr=0.05)
    losses: list[float] = []
    for step in range(num_steps):
        loss = forward(*make_batch(2, 10, seed=step % 4))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def forward_through(model: Any) -> Any:
    return lambda ids, mask, labels: model(ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize(
    ("variant", "mode", "spans"),
    [
        ("llama", "ptune", ONE_HOP),
        ("llama", "deep_ptune", ONE_HOP),
        ("llama", "ptune", FOUR_HOPS),
        ("bloom", "deep_ptune", FOUR_HOPS),
        ("gpt2", "deep_ptune", FOUR_HOPS),
        ("gemma2", "deep_ptune", FOUR_HOPS),
        ("wrapped-opt", "deep_ptune", FOUR_HOPS),
    ],
)
def test_gradients_of_prompts_are_those_of_transformers(
    tiny_models: Any, variant: str, mode: str, spans: Sequence[tuple[int, int]]
) -> None:
    tiny = tiny_models.get(variant)
    with open_model(tiny, spans, tuning_mode=mode, pre_seq_len=5) as model:
        roughen(model)
        local = LocalPromptTuning(tiny, model)
        ids, mask, labels = make_batch()

        output = model(ids, attention_mask=mask, labels=labels)
        expected = local(ids, mask, labels)
        output.loss.backward()
        expected.loss.backward()

        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
        is_text = mask == 1
        assert_close(output.logits.detach()[is_text], expected.logits[:, 5:].detach()[is_text])
        found = [parameter.grad for parameter in list_trained(model)]
        for mine, their in zip(found, local.list_gradients(), strict=True):
            assert_close(mine, their)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("ptune", marks=pytest.mark.thorough), "deep_ptune"])
def test_loss_curve_is_that_of_local_training(tiny_models: Any, mode: str) -> None:
    tiny = tiny_models.get()
    with open_model(tiny, ((0, 2), (2, 4)), tuning_mode=mode, pre_seq_len=4) as model:
        local = LocalPromptTuning(tiny, model)
        expected = compute_losses(local, lambda *batch: local(*batch).loss, 40)
        found = compute_losses(model, forward_through(model), 40)

    assert expected[-1] < 0.8 * expected[0]
    for mine, their in zip(found, expected, strict=True):
        assert mine == pytest.approx(their, rel=0.01)


def test_only_prompts_are_trainable_and_saved(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), tuning_mode="deep_ptune", pre_seq_len=3) as model:
        names = [name for name, value in model.named_parameters() if value.requires_grad]
        state = model.state_dict()

        assert names == [
            "transformer.prompt_embeddings.weight",
            "transformer.intermediate_prompt_embeddings.weight",
        ]
        assert [tuple(value.shape) for value in state.values()] == [(3, 64), (3, 4 * 64)]
        assert list(state) == names
        assert model.config.tuning_mode == "deep_ptune"
        assert model.config.pre_seq_len == 3
        model.load_state_dict(state)
        model.lm_head.weight.requires_grad_()
        assert "lm_head.weight" in model.state_dict()
        with pytest.raises(RuntimeError, match="lm_head"):
            model.load_state_dict(state)


def test_model_inside_of_another_module_leaves_frozen_weights_out_as_well(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), tuning_mode="ptune", pre_seq_len=3) as model:
        outer = torch.nn.Sequential(model, torch.nn.Linear(2, 2))

        state = outer.state_dict()

        assert list(state) == ["0.transformer.prompt_embeddings.weight", "1.weight", "1.bias"]
        outer.load_state_dict(state)


@pytest.mark.parametrize("mode", MODES)
def test_saved_prompts_open_with_the_model(tiny_models: Any, tmp_path: Path, mode: str) -> None:
    tiny, (ids, _, _) = tiny_models.get(), make_batch()
    with open_model(tiny, tuning_mode=mode, pre_seq_len=3) as model:
        roughen(model)
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())

    with open_model(tiny, trained=tmp_path) as model:
        assert model.config.tuning_mode == mode
        assert torch.equal(model(ids).logits, expected)
    assert size < 10_000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "tuning.json"]


def test_prompts_and_adapters_are_told_apart(tiny_models: Any, tmp_path: Path) -> None:
    tiny = tiny_models.get()
    with open_model(tiny, tuning_mode="ptune", pre_seq_len=3) as model:
        model.save_pretrained(tmp_path / "prompts")
    LoraAdapter.create(tiny.reference).save(tmp_path / "lora")

    cases: list[tuple[dict[str, Any], str]] = [
        ({"trained": tmp_path / "lora"}, "a LoRA adapter; open it with active_adapter="),
        ({"active_adapter": tmp_path / "prompts"}, "no adapter; open it with trained="),
    ]
    for options, advice in cases:
        with pytest.raises(UsageError, match=advice), open_model(tiny, **options):
            pass


def test_saved_prompts_of_another_model_are_refused_by_name(
    tiny_models: Any, tmp_path: Path
) -> None:
    with open_model(tiny_models.get(), tuning_mode="ptune", pre_seq_len=3) as model:
        model.save_pretrained(tmp_path)

    with (
        pytest.raises(UsageError, match="another model: its model_type is 'llama'"),
        open_model(tiny_models.get("bloom"), trained=tmp_path),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"holds .* and this model trains"),
        open_model(tiny_models.get(), trained=tmp_path, pre_seq_len=4),
    ):
        pass


def test_damaged_files_are_refused_by_name(tiny_models: Any, tmp_path: Path) -> None:
    with open_model(tiny_models.get(), tuning_mode="ptune", pre_seq_len=3) as model:
        before = model.state_dict()["transformer.prompt_embeddings.weight"].clone()
        with pytest.raises(UsageError, match=r"no tuning\.json"):
            model.load_trained(tmp_path)
        model.transformer.prompt_embeddings.weight.data[0, 0] = float("nan")
        model.save_pretrained(tmp_path)
        model.transformer.prompt_embeddings.weight.data.copy_(before)
        with pytest.raises(UsageError, match="NaN"):
            model.load_trained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "model.safetensors")  # a pickle
        with pytest.raises(UsageError, match=r"model\.safetensors is truncated or damaged"):
            model.load_trained(tmp_path)
        (tmp_path / "tuning.json").write_text("[]")
        with pytest.raises(UsageError, match="damaged"):
            model.load_trained(tmp_path)
        assert torch.equal(model.state_dict()["transformer.prompt_embeddings.weight"], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning_mode": "lora", "pre_seq_len": 3}, "ptune or deep_ptune, not 'lora'"),
        ({"tuning_mode": "ptune"}, "at least 1 token"),
        ({"tuning_mode": "ptune", "pre_seq_len": 2.5}, "whole number"),
        ({"pre_seq_len": 3}, "belongs to a tuning_mode"),
        ({"tuning_mode": "ptune", "pre_seq_len": 512}, "leaves no room"),
    ],
)
def test_tuning_that_cannot_be_is_refused(
    tiny_models: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message), open_model(tiny_models.get(), **options):
        pass


def test_prompts_are_drawn_from_words_with_the_seed_of_torch(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    prompts: list[Tensor] = []
    for _ in range(2):
        with open_model(tiny, tuning_mode="ptune", pre_seq_len=3) as model:
            prompts.append(model.transformer.prompt_embeddings.weight.detach())

    words = tiny.reference.get_input_embeddings().weight
    assert torch.equal(*prompts)
    assert all((words == vector).all(1).any() for vector in prompts[0])


@pytest.mark.parametrize("mode", MODES)
def test_trainer_trains_saves_and_resumes(tiny_models: Any, tmp_path: Path, mode: str) -> None:
    ids, mask, labels = make_batch(8, 10)
    rows = [
        {"input_ids": a, "attention_mask": b, "labels": c}
        for a, b, c in zip(ids, mask.flip(0).clamp(min=1), labels, strict=True)
    ]

    def train(max_steps: int, resume: str | None = None) -> dict[str, Tensor]:
        with open_model(tiny_models.get(), REPLICAS, tuning_mode=mode, pre_seq_len=3) as model:
            arguments = TrainingArguments(
                output_dir=str(tmp_path), max_steps=max_steps, save_steps=2, learning_rate=0.05,
                per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
                disable_tqdm=True, lr_scheduler_type="constant", use_cpu=True,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)  # pyright: ignore[reportArgumentType]
            before = trainer.evaluate()["eval_loss"]
            trainer.train(resume_from_checkpoint=resume)
            assert resume is not None or trainer.evaluate()["eval_loss"] < before
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    expected = train(4)
    resumed = train(4, resume=str(tmp_path / "checkpoint-2"))

    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(saved[name], value)
        assert torch.allclose(resumed[name], value, rtol=1e-4)
    assert list(saved) == sorted(expected)


def test_accelerate_accumulates_gradients_and_saves(tiny_models: Any, tmp_path: Path) -> None:
    with open_model(tiny_models.get(), tuning_mode="ptune", pre_seq_len=3) as model:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        optimizer = torch.optim.SGD(list_trained(model), lr=0.5)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        expected = model.transformer.prompt_embeddings.weight.detach().clone()
        for seed in (1, 2):
            ids, mask, labels = make_batch(seed=seed)
            with accelerator.accumulate(prepared):
                loss = prepared(ids, attention_mask=mask, labels=labels).loss
                accelerator.backward(loss)
                if seed == 2:
                    expected -= 0.5 * model.transformer.prompt_embeddings.weight.grad
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path))

        trained = model.transformer.prompt_embeddings.weight.detach().clone()
        assert torch.allclose(trained, expected)
        torch.nn.init.zeros_(model.transformer.prompt_embeddings.weight)
        accelerator.load_state(str(tmp_path))
        assert torch.equal(model.transformer.prompt_embeddings.weight, trained)


def test_prompts_train_on_when_a_peer_is_lost(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    with open_model(tiny, REPLICAS, tuning_mode="deep_ptune", pre_seq_len=4) as model:
        local = LocalPromptTuning(tiny, model)
        expected = compute_losses(local, lambda *batch: local(*batch).loss, 6)
        forward = forward_through(model)
        num_forwards = 0

        def forward_and_kill(*batch: Tensor) -> Tensor:
            nonlocal num_forwards
            num_forwards += 1
            loss = forward(*batch)
            if num_forwards == 3:
                model.swarm.network.kill("peer0")
                model.swarm.network.kill("peer3")
            return loss

        assert compute_losses(model, forward_and_kill, 6) == pytest.approx(expected, rel=1e-3)
