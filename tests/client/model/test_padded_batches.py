"""Batches of prompts of different lengths, padded on the left as transformers wants them."""

from typing import Any

import pytest
import torch
from generation_scene import make_ids
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from shoal.protocol.errors import UsageError

PAD = 0
IDS = make_ids(4, 9)
NUM_PADDING = (3, 0, 8, 3)


def pad(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids whose rows begin late, and their mask."""
    mask = torch.stack([torch.arange(ids_BT.shape[1]) >= num for num in NUM_PADDING]).long()
    return torch.where(mask == 1, ids_BT, PAD), mask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=str,
)
def test_padded_batch_equals_transformers(pair: Any, options: dict[str, Any]) -> None:
    ids, mask = pad(IDS)
    options |= {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": PAD}

    torch.manual_seed(3)
    expected = pair.reference.generate(ids, **options)
    torch.manual_seed(3)
    text = pair.model.generate(ids, **options)

    if not isinstance(text, Tensor):
        text, expected = text.sequences, expected.sequences
    assert torch.equal(text, expected)
    assert len(pair.client.sessions) == 3, "rows of one length share a session"
    assert [session.max_length for session in pair.client.sessions] == [17, 14, 9]
    assert all(session.closed for session in pair.client.sessions)


def test_padding_token_at_the_beginning_is_padding_without_a_mask(pair: Any) -> None:
    ids, _ = pad(IDS)
    options = {"pad_token_id": PAD, "eos_token_id": 2, "max_new_tokens": 8}

    text = pair.model.generate(ids, **options)

    assert torch.equal(text, pair.reference.generate(ids, **options))


def test_rows_are_the_same_alone_and_in_a_padded_batch(pair: Any) -> None:
    ids, mask = pad(IDS)
    options = {"max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": None}

    together = pair.model.generate(ids, attention_mask=mask, **options)

    for row, num_padding in enumerate(NUM_PADDING):
        alone = pair.model.generate(IDS[row : row + 1, num_padding:], **options)
        assert torch.equal(alone[0], together[row, num_padding:])


@pytest.mark.parametrize(
    "mask", [[[1, 1, 0]], [[1, 0, 1]], [[0, 0, 0]], [[0, 2, 1]]], ids=lambda mask: str(mask[0])
)
def test_padding_that_is_not_at_the_beginning_is_refused(pair: Any, mask: list[list[int]]) -> None:
    with pytest.raises(UsageError, match=r"attention mask|on the left"):
        pair.model.generate(torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor(mask))

    assert pair.client.sessions == []


def test_padded_row_may_be_assisted(pair: Any) -> None:
    ids, mask = pad(IDS)
    options = {"attention_mask": mask[:1], "max_new_tokens": 8, "prompt_lookup_num_tokens": 2}

    text = pair.model.generate(ids[:1], **options)

    assert torch.equal(text, pair.reference.generate(ids[:1], **options))


def test_padded_prompts_are_not_cut(pair: Any) -> None:
    ids, mask = pad(IDS)
    with pytest.raises(UsageError, match="prefill_chunk_size"):
        pair.model.generate(ids, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=4)

    assert pair.client.sessions == []


def test_session_takes_no_padding(pair: Any) -> None:
    ids, mask = pad(IDS)
    with pair.model.inference_session(max_length=32) as session:
        with pytest.raises(UsageError, match="takes no padding"):
            pair.model.generate(ids, attention_mask=mask, pad_token_id=PAD)
        pair.model.generate(IDS, max_new_tokens=2)
        with pytest.raises(UsageError, match="takes no padding"):
            pair.model.generate(ids, attention_mask=mask, pad_token_id=PAD)
        assert session.position == 10


class Interrupt(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_sessions_of_a_padded_batch_are_closed_when_it_is_interrupted(pair: Any) -> None:
    ids, mask = pad(IDS)
    stop = StoppingCriteriaList([Interrupt()])

    with pytest.raises(KeyboardInterrupt):
        pair.model.generate(ids, attention_mask=mask, max_new_tokens=3, stopping_criteria=stop)

    assert [session.closed for session in pair.client.sessions] == [True] * 3
