"""generate() in a session that stays open: continued, rolled back, interrupted."""

import warnings
from typing import Any

import pytest
import torch
from generation_scene import Recorder, make_ids
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shoal.protocol.errors import UsageError


def test_calls_in_one_session_continue_the_text_without_computing_it_again(pair: Any) -> None:
    ids = make_ids(3, 6)
    expected = pair.reference.generate(ids, max_new_tokens=10, repetition_penalty=1.2)

    recorder = Recorder()
    with pair.model.inference_session(max_length=16) as session:
        options = {"repetition_penalty": 1.2}
        parts = [
            pair.model.generate(ids, session=session, max_new_tokens=1, **options),
            pair.model.generate(None, max_new_tokens=8, streamer=recorder, **options),
            pair.model.generate(max_new_tokens=1, **options),
        ]

    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert [part.shape[1] for part in parts] == [7, 8, 1]
    assert sum(step.num_tokens for step in session.sent) == 15
    assert recorder.values[0].shape == (3, 0)
    assert session.closed


def test_text_without_an_input_begins_with_the_bos_token(pair: Any) -> None:
    expected = pair.reference.generate(bos_token_id=7, max_new_tokens=4)

    assert torch.equal(pair.model.generate(bos_token_id=7, max_new_tokens=4), expected)
    with pair.model.inference_session(max_length=16) as session:
        first = pair.model.generate(max_new_tokens=1, session=session, bos_token_id=7)
        rest = pair.model.generate(max_new_tokens=3, session=session)
        assert torch.equal(torch.cat([first, rest], dim=1), expected)


def test_new_input_is_appended_to_the_text_of_a_session(pair: Any) -> None:
    ids, more_ids = make_ids(1, 6), make_ids(1, 4, seed=5)
    first = pair.reference.generate(ids, max_new_tokens=3)
    expected = pair.reference.generate(torch.cat([first, more_ids], dim=1), max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(ids, max_new_tokens=3)
        text = pair.model.generate(more_ids, max_new_tokens=5)

    assert torch.equal(text, expected[:, first.shape[1] :])
    assert torch.equal(session.output_ids, expected)


@pytest.mark.parametrize("num_shared", [16, 15, 8], ids="shares {} of 16".format)
def test_text_that_is_given_again_continues_where_it_differs(pair: Any, num_shared: int) -> None:
    ids, more_ids = make_ids(2, 12), make_ids(2, 5, seed=5)
    recorder = Recorder()
    with pair.model.inference_session(max_length=60) as session:
        text = pair.model.generate(ids, max_new_tokens=4)
        history = torch.cat([text[:, :num_shared], more_ids], dim=1)
        expected = pair.reference.generate(history, max_new_tokens=5)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            text = pair.model.generate(history, max_new_tokens=5, streamer=recorder)
        sent = session.sent[4:]

    assert torch.equal(text, expected)
    assert [one.filename for one in warned] == [__file__] * (num_shared < 16)
    assert torch.equal(session.output_ids, expected)
    assert torch.equal(recorder.values[0], history)
    assert sum(step.num_tokens for step in sent) == len(expected[0]) - min(num_shared, 15) - 1


def test_prompt_that_is_given_again_is_tried_again(pair: Any) -> None:
    ids = make_ids(1, 5)
    with pair.model.inference_session(max_length=60) as session:
        first = pair.model.generate(ids, max_new_tokens=9)
        with pytest.warns(UserWarning, match="whose other 9 are dropped"):
            second = pair.model.generate(ids, max_new_tokens=9)

        assert torch.equal(first, second)
        assert torch.equal(session.output_ids, first)


def test_rows_of_a_text_that_is_given_again_differ_at_different_tokens(pair: Any) -> None:
    ids = make_ids(2, 12)
    with pair.model.inference_session(max_length=60):
        history = pair.model.generate(ids, max_new_tokens=4)
        history[0, 10] = 5
        history[1, 13] = 5
        with pytest.warns(UserWarning, match="begins with 10 tokens"):
            text = pair.model.generate(history, max_new_tokens=5)

    assert torch.equal(text, pair.reference.generate(history, max_new_tokens=5))


def test_failed_call_with_other_rows_leaves_a_text_that_was_given_again(pair: Any) -> None:
    ids = make_ids(1, 12)
    with pair.model.inference_session(max_length=60) as session:
        text = pair.model.generate(ids, max_new_tokens=4)
        expected = pair.reference.generate(text, max_new_tokens=3)
        stop = StoppingCriteriaList([Interrupt()])
        with pytest.warns(match="are dropped"), pytest.raises(KeyboardInterrupt):
            pair.model.generate(ids, num_beams=2, max_new_tokens=3, stopping_criteria=stop)
        pair.model.generate(max_new_tokens=3)

        assert torch.equal(session.output_ids, expected)


class Interrupt(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_input_that_begins_like_the_text_by_chance_is_appended(pair: Any) -> None:
    ids = make_ids(1, 12)
    with pair.model.inference_session(max_length=60) as session:
        first = pair.model.generate(ids, max_new_tokens=4)
        pair.model.generate(torch.cat([ids[:, :7], make_ids(1, 3, seed=5)], 1), max_new_tokens=1)

        assert session.output_ids.shape == (1, 16 + 10 + 1)
        assert torch.equal(session.output_ids[:, :16], first)


def test_rollback_shortens_the_text_that_generate_remembers(pair: Any) -> None:
    ids, more_ids = make_ids(2, 6), make_ids(2, 3, seed=5)
    expected = pair.reference.generate(torch.cat([ids[:, :4], more_ids], dim=1), max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(ids, max_new_tokens=8)
        session.position = 4
        text = pair.model.generate(more_ids, max_new_tokens=5)

    assert torch.equal(torch.cat([ids[:, :4], text], dim=1), expected)


def test_beam_search_in_a_session_is_continued_by_another(pair: Any) -> None:
    ids = make_ids(2, 6)
    first = pair.reference.generate(ids, max_new_tokens=5, num_beams=3)
    expected = pair.reference.generate(first, max_new_tokens=4, num_beams=3)

    with pair.model.inference_session(max_length=30):
        parts = [
            pair.model.generate(ids, max_new_tokens=5, num_beams=3),
            pair.model.generate(None, max_new_tokens=4, num_beams=3),
        ]

    assert torch.equal(torch.cat(parts, dim=1), expected)


def test_text_of_other_rows_says_what_to_do(pair: Any) -> None:
    with pair.model.inference_session(max_length=30):
        pair.model.generate(make_ids(1, 6), max_new_tokens=3, num_beams=3)

        with pytest.raises(UsageError, match=r"new input 2; set session\.position = 0"):
            pair.model.generate(make_ids(2, 2), max_new_tokens=3)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_failed_call_leaves_the_session_as_it_was(pair: Any, num_beams: int) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] >= 12:
                raise ZeroDivisionError
            return scores

    ids, more_ids = make_ids(2, 6), make_ids(2, 2, seed=5)
    options = {"max_new_tokens": 3, "num_beams": num_beams}
    first = pair.reference.generate(ids, **options)
    expected = pair.reference.generate(first, **options)

    with pair.model.inference_session(max_length=40) as session:
        pair.model.generate(ids, **options)
        position = session.position
        with pytest.raises(ZeroDivisionError):
            pair.model.generate(
                more_ids,
                max_new_tokens=8,
                num_beams=num_beams,
                logits_processor=LogitsProcessorList([Broken()]),
            )
        assert session.position == position
        text = pair.model.generate(None, **options)

    assert torch.equal(text, expected[:, first.shape[1] :])


def test_interrupt_in_a_streamer_leaves_the_session_usable(pair: Any) -> None:
    ids = make_ids(1, 6)
    expected = pair.reference.generate(ids, max_new_tokens=5)

    with pair.model.inference_session(max_length=30) as session:
        with pytest.raises(KeyboardInterrupt):
            pair.model.generate(ids, max_new_tokens=9, streamer=Recorder(interrupt_after=4))
        assert session.position == 0
        text = pair.model.generate(ids, max_new_tokens=5)

    assert torch.equal(text, expected)


def test_interrupt_closes_a_session_of_the_call_itself(pair: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        pair.model.generate(make_ids(1, 6), max_new_tokens=9, streamer=Recorder(interrupt_after=4))

    assert pair.client.sessions[-1].closed


def test_forward_in_a_session_is_part_of_its_text(pair: Any) -> None:
    ids = make_ids(2, 8)
    expected = pair.reference.generate(ids, max_new_tokens=5)

    with pair.model.inference_session(max_length=30):
        pair.model(ids[:, :3])
        pair.model(ids[:, 3:5])
        text = pair.model.generate(ids[:, 5:], max_new_tokens=5)

    assert torch.equal(text, expected[:, 5:])


def test_forward_may_send_the_last_token_of_a_text(pair: Any) -> None:
    ids = make_ids(1, 4)
    expected = pair.reference.generate(ids, max_new_tokens=9)

    with pair.model.inference_session(max_length=30) as session:
        text = pair.model.generate(ids, max_new_tokens=3)
        logits = pair.model(session.last_token_id).logits
        rest = pair.model.generate(logits.argmax(dim=-1), max_new_tokens=5)

    assert torch.equal(torch.cat([text, rest], dim=1), expected)


def test_text_is_unknown_after_forward_of_single_beams(pair: Any) -> None:
    with pair.model.inference_session(max_length=30) as session:
        pair.model.generate(make_ids(1, 6), max_new_tokens=3, num_beams=3)
        pair.model(make_ids(3, 2))

        assert session.output_ids is None
        with pytest.raises(UsageError, match="output_ids"):
            pair.model.generate(None, max_new_tokens=3, num_beams=3)


def test_text_of_manual_steps_must_be_told(pair: Any) -> None:
    ids = make_ids(1, 8)
    hidden = pair.model.transformer.word_embeddings(ids[:, :5])

    with pair.model.inference_session(max_length=30) as session:
        session.step(hidden)
        with pytest.raises(UsageError, match="output_ids"):
            pair.model.generate(ids[:, 5:], max_new_tokens=3)
        session.output_ids = ids[:, :5]
        text = pair.model.generate(ids[:, 5:], max_new_tokens=3)

    assert torch.equal(text, pair.reference.generate(ids, max_new_tokens=3)[:, 5:])
