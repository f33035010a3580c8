"""Labels give the loss of transformers, and what is padded on the right changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from tuning_scene import REPLICAS, make_batch, open_model

from shoal.protocol.errors import UsageError


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Iterator[Any]:
    with open_model(tiny_models.get(), REPLICAS) as model:
        yield model


def test_loss_is_that_of_transformers(model: Any, tiny_models: Any) -> None:
    ids, mask, labels = make_batch()
    reference = tiny_models.get().reference

    for options in ({}, {"num_items_in_batch": 7}):
        output = model(ids, attention_mask=mask, labels=labels, **options)
        expected = reference(ids, attention_mask=mask, labels=labels, **options)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    loss, logits = model(ids, attention_mask=mask, labels=labels, return_dict=False)
    assert loss == model(ids, labels=labels).loss
    torch.testing.assert_close(logits[mask == 1], expected.logits[mask == 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_padding_on_the_right_changes_no_other_token(model: Any, with_gradient: bool) -> None:
    ids, mask, _ = make_batch()
    lengths = mask.sum(1).tolist()
    others = torch.where(mask == 1, ids, 5)

    logits = [
        model(inputs_embeds=embed(model, text, with_gradient), attention_mask=mask).logits
        for text in (ids, others)
    ]

    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length]).logits[0]
        assert torch.equal(logits[0][row, :length], logits[1][row, :length])
        torch.testing.assert_close(logits[0][row, :length], alone, atol=1e-4, rtol=0)


def embed(model: Any, ids: Tensor, with_gradient: bool) -> Tensor:
    return model.transformer.word_embeddings(ids).requires_grad_(with_gradient)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "padding_side = 'right'"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padding_side = 'right'"),
        ({"attention_mask": torch.ones(1, 4)}, r"\[1, 3\], not \[1, 4\]"),
        ({"attention_mask": torch.tensor([[1, 1, 3]])}, "may only contain 0 and 1"),
        ({"attention_mask": [[1, 1, 1]]}, "list"),
        ({"labels": torch.tensor([[5, 6]])}, r"\[1, 3\], not \[1, 2\]"),
        ({"labels": torch.tensor([[5, 6, 128]])}, "label 128 of row 0, token 2 is out of range"),
        ({"labels": torch.tensor([[5, -1, 6]])}, "label -1 of row 0, token 1"),
        ({"labels": torch.tensor([[5.0, 6.0, 7.0]])}, "whole numbers"),
        ({"labels": torch.tensor([[5, 6, 7]]), "logits_to_keep": 1}, "leave logits_to_keep out"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_batch_is_refused_by_name(
    model: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        model(torch.tensor([[5, 6, 7]]), **arguments)


def test_session_takes_no_padding(model: Any) -> None:
    with (
        model.inference_session(max_length=8),
        pytest.raises(UsageError, match="do not support padding"),
    ):
        model(torch.tensor([[5, 6]]), attention_mask=torch.tensor([[1, 0]]))
