"""Assisted decoding over remote blocks gives the words of plain decoding, in every session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation_scene import make_ids
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from shoal.client.model.generation import BoundedCandidates
from shoal.protocol.errors import UsageError


def make_options(pair: Any, kind: str) -> dict[str, Any]:
    if kind == "assistant":
        return {"assistant_model": pair.reference}
    return {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("max_length", [100, 22])
def test_assisted_call_continues_a_session(pair: Any, kind: str, max_length: int) -> None:
    ids, more_ids = make_ids(1, 5), make_ids(1, 2, seed=5).repeat(1, 2)
    first = pair.reference.generate(ids, max_new_tokens=4)
    second = pair.reference.generate(torch.cat([first, more_ids], dim=1), max_new_tokens=8)
    expected = pair.reference.generate(second, max_new_tokens=2)

    with pair.model.inference_session(max_length=max_length) as session:
        pair.model.generate(ids, max_new_tokens=4)
        pair.model.generate(more_ids, max_new_tokens=8, **make_options(pair, kind))
        assert torch.equal(session.output_ids, second)
        assert session.position == second.shape[1] - 1
        pair.model.generate(max_new_tokens=2)

    assert torch.equal(session.output_ids, expected)
    sizes = [step.num_tokens for step in session.sent]
    assert all(size < 9 for size in sizes), "the whole text was sent again"
    assert max(sizes[4:]) > 1, "nothing was guessed"


@pytest.mark.parametrize("max_new_tokens", [5, 6, 7])
def test_guesses_end_with_the_text(pair: Any, max_new_tokens: int) -> None:
    # What repeats is guessed on, by more tokens than the text may still get.
    ids = make_ids(1, 4).repeat(1, 4)
    expected = pair.reference.generate(ids, max_new_tokens=max_new_tokens)

    length = ids.shape[1] + max_new_tokens
    with pair.model.inference_session(max_length=length - 1) as session:
        text = pair.model.generate(ids, max_new_tokens=max_new_tokens, prompt_lookup_num_tokens=10)

    assert torch.equal(text, expected)
    assert session.position == length - 1


class Guesser(CandidateGenerator):
    """Guesses five tokens, whatever the text is."""

    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.cat([input_ids, torch.ones_like(input_ids[:, :5])], 1), torch.zeros(1, 5, 9)


@pytest.mark.parametrize(("max_length", "num_guessed"), [(20, 5), (12, 3), (9, 0), (8, 0)])
def test_guesses_and_their_logits_are_cut_alike(max_length: int, num_guessed: int) -> None:
    bounded = BoundedCandidates(Guesser(), max_length)

    ids, logits = bounded.get_candidates(torch.ones(1, 8, dtype=torch.int64))

    assert logits is not None
    assert (ids.shape[1], logits.shape[1]) == (8 + num_guessed, num_guessed)


def test_assistant_that_looks_into_the_blocks_is_refused() -> None:
    class Insider(Guesser):
        requires_model_outputs = True

    with pytest.raises(UsageError, match="hidden states between blocks"):
        BoundedCandidates(Insider(), 9)


@pytest.mark.parametrize("options", [{"assistant_early_exit": 2}, {"use_mtp": True}], ids=str)
def test_assistance_from_within_the_model_is_refused(pair: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not take"):
        pair.model.generate(make_ids(1, 3), max_new_tokens=3, **options)

    assert pair.client.sessions == []
