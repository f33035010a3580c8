"""Calls of generate() that cannot be answered are refused before anything is sent."""

from typing import Any

import pytest
import torch
from generation_scene import make_ids

from shoal.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "empty"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, "shape"),
        (torch.tensor([5, 6]), {}, "shape"),
        (torch.tensor([[5.0, 6.0]]), {}, "whole numbers"),
        ([[5, 6]], {}, "return_tensors"),
        (torch.tensor([[5, 128]]), {}, "from 0 to 127, got 5 to 128"),
        (torch.tensor([[5, 6]]), {"input_ids": torch.tensor([[5]])}, "either"),
        (torch.tensor([[5, 6]]), {"attention_mask": torch.tensor([[1, 0]])}, "pad on the left"),
        (torch.tensor([[5, 6]]), {"attention_mask": torch.ones(2, 2)}, "shape"),
        (torch.tensor([[5, 6]]), {"attention_mask": [[1, 1]]}, "tensor"),
        (torch.tensor([[6, 0]]), {"pad_token_id": 0, "eos_token_id": 2}, "token 0 is not meant"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": 511}, "make 513, the model has 512"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": 0}, "at least 1"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": None, "max_length": 2}, "max_length is 2"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": "5"}, "whole number, not '5'"),
        (torch.tensor([[5, 6]]), {"max_new_tokens": True}, "whole number, not True"),
        (torch.tensor([[5, 6]]), {"generation_config": {}}, "a GenerationConfig, not dict"),
        (torch.tensor([[5, 6]]), {"num_beams": 257}, "257 rows"),
        (torch.tensor([[5, 6]]), {"use_cache": False}, "use_cache"),
        (torch.tensor([[5, 6]]), {"cache_implementation": "static"}, "cache_implementation"),
        (torch.tensor([[5, 6]]), {"guidance_scale": 2.0}, "guidance"),
        (torch.tensor([[5, 6]]), {"inputs_embeds": torch.zeros(1, 2, 64)}, "inputs_embeds"),
        (torch.tensor([[5, 6]]), {"output_attentions": True}, "output_attentions"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_call_is_refused_before_anything_is_sent(
    pair: Any, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pair.model.generate(inputs, **{"max_new_tokens": 3, **options})

    assert pair.client.sessions == []


def test_text_cannot_begin_with_nothing(pair: Any) -> None:
    pair.model.generation_config.bos_token_id = None

    with pytest.raises(UsageError, match="the prompt is empty"):
        pair.model.generate(max_new_tokens=3)


def test_padding_token_is_accepted_when_the_mask_says_it_is_meant(pair: Any) -> None:
    ids = torch.tensor([[0, 6, 7]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 3}

    text = pair.model.generate(ids, **options)

    assert torch.equal(text, pair.reference.generate(ids, **options))


def test_session_that_is_too_short_is_refused_before_anything_is_sent(pair: Any) -> None:
    with pair.model.inference_session(max_length=8) as session:
        with pytest.raises(UsageError, match="grow to 10 tokens and the session holds 8"):
            pair.model.generate(make_ids(1, 6), max_new_tokens=4)
        assert session.sent == []
        # The last token of a text is never sent.
        assert pair.model.generate(make_ids(1, 6), max_new_tokens=3).shape == (1, 9)


def test_closed_session_is_refused(pair: Any) -> None:
    with pair.model.inference_session(max_length=8) as session:
        pass

    with pytest.raises(UsageError, match="closed"):
        pair.model.generate(make_ids(1, 2), session=session, max_new_tokens=2)


@pytest.mark.parametrize("session", ["x", 5, True, object()])
def test_what_is_no_session_is_refused(pair: Any, session: Any) -> None:
    with pytest.raises(UsageError, match=r"^session must be one that model\.inference_session"):
        pair.model.generate(make_ids(1, 2), session=session, max_new_tokens=2)
    with (
        pytest.raises(UsageError, match="session must be"),
        pair.model.use_session(session),
    ):
        pass

    assert pair.model.active_session is None


@pytest.mark.parametrize("max_length", [513, 2**70])
def test_session_longer_than_the_model_is_refused_at_once(pair: Any, max_length: int) -> None:
    with pytest.raises(UsageError, match=r"too many: the model has 512 positions"):
        pair.model.inference_session(max_length=max_length)

    with pair.model.inference_session(max_length=512):
        pass
