"""Classifiers over remote blocks are those of transformers, trained by head and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from tuning_scene import (
    FOUR_HOPS,
    ONE_HOP,
    REPLICAS,
    assert_close,
    list_trained,
    make_batch,
    open_model,
)

from shoal.client import AutoDistributedModelForSequenceClassification as AutoClassifier
from shoal.protocol.errors import UsageError

PAD = 7


@pytest.fixture(scope="module")
def classifier(tiny_models: Any) -> Iterator[Any]:
    with open_model(tiny_models.get(), REPLICAS, AutoClassifier, num_labels=3) as model:
        yield model


def make_reference(tiny_model: Any, classifier: Any, **options: Any) -> Any:
    reference: Any = AutoModelForSequenceClassification.from_pretrained(
        tiny_model.directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    reference.score.load_state_dict(classifier.score.state_dict())
    reference.base_model.requires_grad_(False)
    reference.config.pad_token_id = PAD
    return reference.eval()


def make_texts() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask, _ = make_batch(4, 10)
    return torch.where(mask == 1, ids.clamp(min=PAD + 1), PAD), mask


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels"),
    [
        (None, 3, torch.tensor([0, 2, 1, -100])),
        (None, 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (None, 3, torch.tensor([[1.0, 0, 1]] * 4)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
        ("regression", 2, torch.tensor([[0.5, 2.0]] * 4)),
        ("multi_label_classification", 3, torch.tensor([[0.0, 0, 1]] * 4)),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(
    tiny_models: Any, problem_type: str | None, num_labels: int, labels: torch.Tensor
) -> None:
    tiny, (ids, mask) = tiny_models.get(), make_texts()
    options = {"num_labels": num_labels, "problem_type": problem_type}
    with open_model(tiny, ONE_HOP, AutoClassifier, **options) as model:
        reference = make_reference(tiny, model, **options)
        output = model(ids, attention_mask=mask, labels=labels)
        expected = reference(ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        expected.loss.backward()

        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=0)
        assert_close(output.logits.detach(), expected.logits.detach())
        assert_close(model.score.weight.grad, reference.score.weight.grad)
        names = [name for name, value in model.named_parameters() if value.requires_grad]
        assert names == list(model.state_dict()) == ["score.weight"]


@pytest.mark.parametrize("variant", ["bloom", "gpt2", "gemma2", "wrapped-gpt-neox"])
def test_families_have_their_own_norm_before_the_head(tiny_models: Any, variant: str) -> None:
    tiny, (ids, mask) = tiny_models.get(variant), make_texts()
    with open_model(tiny, FOUR_HOPS, AutoClassifier, num_labels=2) as model:
        expected = make_reference(tiny, model, num_labels=2)(ids, attention_mask=mask)

        assert_close(model(ids, attention_mask=mask).logits.detach(), expected.logits.detach())


def test_last_token_is_found_without_a_mask_as_well(classifier: Any) -> None:
    ids, mask = make_texts()
    expected = classifier(ids, attention_mask=mask).logits

    with pytest.raises(UsageError, match="cannot find the end of each row"):
        classifier(ids)
    assert torch.equal(classifier(ids[:1]).logits, classifier(ids[:1], mask[:1]).logits)
    classifier.config.pad_token_id = PAD
    try:
        assert torch.equal(classifier(ids).logits, expected)
    finally:
        classifier.config.pad_token_id = None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 3, 1]), r"label 3 of row 1 is out of range: .* 3 labels, 0 to 2"),
        (torch.tensor([0, 1, -1]), "label -1 of row 2"),
        (torch.tensor([0, 1]), r"shape \[3\], not \[2\]"),
        (torch.tensor([[1.0, 2.0, 0.0]] * 3), "numbers from 0 to 1"),
        ([0, 1, 2], "must be a tensor"),
    ],
)
def test_labels_out_of_range_are_named(classifier: Any, labels: Any, message: str) -> None:
    ids, mask = make_texts()

    with pytest.raises(UsageError, match=message):
        classifier(ids[:3], attention_mask=mask[:3], labels=labels)


def test_row_of_padding_is_named(classifier: Any) -> None:
    with pytest.raises(UsageError, match="row 1 contains only padding"):
        classifier(torch.tensor([[5, 6], [5, 6]]), torch.tensor([[1, 1], [0, 0]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_labels": 0}, "num_labels"), ({"problem_type": "guess"}, "problem_type must be one of")],
)
def test_classifier_that_cannot_be_is_refused(
    tiny_models: Any, options: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(UsageError, match=message),
        open_model(tiny_models.get(), kind=AutoClassifier, **options),
    ):
        pass


@pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
def test_head_and_prompts_learn_together_and_are_saved(
    tiny_models: Any, tmp_path: Path, mode: str
) -> None:
    ids, mask = make_texts()
    labels = torch.tensor([0, 1, 0, 1])
    options = {"num_labels": 2, "tuning_mode": mode, "pre_seq_len": 4}
    with open_model(tiny_models.get(), REPLICAS, AutoClassifier, **options) as model:
        optimizer = torch.optim.AdamW(list_trained(model), lr=0.05)
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
        expected = model(ids, attention_mask=mask).logits
        model.save_pretrained(tmp_path)

    assert torch.equal(expected.argmax(1), labels)
    with open_model(tiny_models.get(), kind=AutoClassifier, trained=tmp_path) as model:
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)
        assert model.config.num_labels == 2


def test_trainer_trains_a_classifier(tiny_models: Any, tmp_path: Path) -> None:
    ids, mask = make_texts()
    rows = [
        {"input_ids": a, "attention_mask": b, "labels": c % 2}
        for a, b, c in zip(ids, mask, range(4), strict=True)
    ]
    options = {"num_labels": 2, "tuning_mode": "ptune", "pre_seq_len": 4}
    with open_model(tiny_models.get(), REPLICAS, AutoClassifier, **options) as model:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=10, learning_rate=0.05, report_to=[],
            per_device_train_batch_size=4, disable_tqdm=True, use_cpu=True, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)  # pyright: ignore[reportArgumentType]
        before = trainer.evaluate()["eval_loss"]
        trainer.train()

        assert trainer.evaluate()["eval_loss"] < 0.5 * before


def test_session_classifies_what_was_said_so_far(classifier: Any) -> None:
    ids, _ = make_texts()
    expected = classifier(ids[:1]).logits

    with classifier.inference_session(max_length=10):
        classifier(ids[:1, :6])
        found = classifier(ids[:1, 6:]).logits

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
