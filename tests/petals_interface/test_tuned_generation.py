"""Texts go on behind trained prompts, in one call and in sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from tuning_scene import REPLICAS, LocalPromptTuning, open_model, roughen

from shoal.protocol.errors import UsageError

IDS = torch.tensor([[5, 9, 60, 17], [30, 31, 8, 99]])
NUM_PROMPT_TOKENS = 6


@pytest.fixture(params=["ptune", "deep_ptune"])
def tuned(request: pytest.FixtureRequest, tiny_models: Any) -> Iterator[tuple[Any, Any]]:
    """A tuned model, and what its texts must equal."""
    options = {"tuning_mode": request.param, "pre_seq_len": NUM_PROMPT_TOKENS}
    with open_model(tiny_models.get(), REPLICAS, **options) as model:
        roughen(model)
        yield model, LocalPromptTuning(tiny_models.get(), model)


def test_text_follows_from_the_prompt(tuned: Any, tiny_models: Any) -> None:
    model, local = tuned

    found = model.generate(IDS, max_new_tokens=12)

    assert torch.equal(found, local.generate(IDS, max_new_tokens=12))
    assert not torch.equal(
        found, tiny_models.get().reference.generate(IDS, max_new_tokens=12, do_sample=False)
    )


def test_session_counts_the_prompt_and_continues(tuned: Any) -> None:
    model, local = tuned
    expected = local.generate(IDS, max_new_tokens=9)

    with model.inference_session(max_length=NUM_PROMPT_TOKENS + 14) as session:
        first = model.generate(IDS, max_new_tokens=4)
        assert session.position == NUM_PROMPT_TOKENS + 7
        second = model.generate(max_new_tokens=5)
        assert torch.equal(torch.cat([first, second], dim=1), expected)
        with session.fork() as fork:
            assert fork.num_prompt_tokens == NUM_PROMPT_TOKENS
            fork.position = NUM_PROMPT_TOKENS + 4
            assert torch.equal(fork.output_ids, IDS)
            assert torch.equal(
                model.generate(session=fork, max_new_tokens=9)[:, :9], expected[:, 4:]
            )
        with pytest.raises(UsageError, match="session holds 20"):
            model.generate(max_new_tokens=3)
        session.position = NUM_PROMPT_TOKENS
        assert session.output_ids.shape == (2, 0)
        assert torch.equal(model.generate(IDS, max_new_tokens=9), expected)
        with pytest.raises(UsageError, match="cannot be cut"):
            session.position = 3


def test_calls_of_the_model_in_a_session_continue_it(tuned: Any) -> None:
    model, local = tuned
    expected = run_local(local, IDS)

    with model.inference_session(max_length=NUM_PROMPT_TOKENS + 14) as session:
        first = model(IDS[:, :3]).logits
        second = model(IDS[:, 3:]).logits
        torch.testing.assert_close(torch.cat([first, second], dim=1), expected, atol=1e-4, rtol=0)
        session.position = 0
        torch.testing.assert_close(model(IDS[:, :1]).logits, expected[:, :1], atol=1e-4, rtol=0)
        assert torch.equal(session.output_ids, IDS[:, :1])
        assert session.position == NUM_PROMPT_TOKENS + 1


def run_local(local: Any, ids: Tensor) -> Tensor:
    labels = torch.full_like(ids, -100)
    with torch.no_grad():
        return local(ids, torch.ones_like(ids), labels).logits[:, NUM_PROMPT_TOKENS:]


def test_beams_and_guesses_follow_from_the_prompt(tuned: Any, tiny_models: Any) -> None:
    model, local = tuned
    options: dict[str, Any] = {"max_new_tokens": 10}
    one = IDS[:1]

    guessed = model.generate(one, prompt_lookup_num_tokens=3, **options)
    beams = model.generate(one, num_beams=3, num_return_sequences=3, **options)

    assert torch.equal(guessed, local.generate(one, **options))
    logits = run_local(local, beams)
    scores = logits[:, 3:-1].log_softmax(-1).gather(2, beams[:, 4:, None]).sum(dim=(1, 2))
    assert torch.equal(scores.argsort(descending=True), torch.arange(3))


def test_prompt_takes_its_place_among_the_positions(tuned: Any) -> None:
    model, _ = tuned

    with pytest.raises(UsageError, match="the model has 506 positions"):
        model.generate(IDS, max_new_tokens=503)
    with pytest.raises(UsageError, match="513 tokens are too many"):
        model(torch.full((1, 507), 5))
