"""What `shoal bench` asks of a model, and what it makes of the times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.cli.benchmarking.swarm_speed import (
    CONTEXT_TOKENS,
    make_hidden,
    make_text_settings,
    measure_swarm,
    time_calls,
    time_session,
)


class Session:
    """A session that notes its steps."""

    hops = ("one", "other")
    failovers = ("lost",)

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.position = 0
        self.sent: list[Tensor] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def rollback(self, position: int) -> None:
        self.position = position

    def step(self, hidden_BTH: Tensor, *, last_token_only: bool = False) -> None:
        self.position += hidden_BTH.shape[1]
        assert self.position <= self.max_length
        self.sent.append(hidden_BTH)


class Remote:
    """A model whose swarm takes no time."""

    def __init__(self, max_positions: int) -> None:
        self.config = SimpleNamespace(
            hidden_size=4, vocab_size=10, max_position_embeddings=max_positions
        )
        self.sessions: list[Session] = []
        self.generated: list[int] = []

    def inference_session(self, max_length: int) -> Session:
        self.sessions.append(Session(max_length))
        return self.sessions[-1]

    def generate(self, tokens_BT: Tensor, **settings: Any) -> None:
        self.generated.append(settings["max_new_tokens"])


def test_session_has_a_short_prompt_and_then_steps_of_one_token() -> None:
    remote: Any = Remote(max_positions=256)

    times = time_session(remote, 5)

    (session,) = remote.sessions
    assert [one.shape[1] for one in session.sent] == [CONTEXT_TOKENS, 1, 1, 1, 1, 1]
    assert session.max_length == CONTEXT_TOKENS + 5
    assert (len(times.step_seconds), times.num_hops, times.num_failovers) == (5, 2, 1)


def test_hidden_states_are_never_sent_twice() -> None:
    remote: Any = Remote(max_positions=256)

    time_session(remote, 5)

    _, *steps = remote.sessions[0].sent
    assert not any(
        torch.equal(one, other) for number, one in enumerate(steps) for other in steps[number + 1 :]
    )
    assert make_hidden(4, 3, num_rows=2).shape == (2, 3, 4)


def test_swarm_is_measured_in_steps_prompts_and_texts_within_the_models_positions() -> None:
    remote: Any = Remote(max_positions=256)
    said: list[str] = []

    figures = measure_swarm(remote, said.append)

    assert said == ["steps", "prompts", "texts"]
    by_name = {figure.name: figure for figure in figures}
    assert by_name["peers on the way"].value == 2
    assert by_name["peers lost meanwhile"].value == 1
    assert by_name["prompt of 256"].unit == "tok/s"
    assert len(set(remote.generated)) == 1
    assert all(figure.value > 0 for figure in figures)


def test_first_call_only_warms_up() -> None:
    calls: list[None] = []

    seconds = time_calls(lambda: calls.append(None), 3)

    assert (len(calls), len(seconds)) == (4, 3)


def test_text_has_exactly_the_wanted_number_of_tokens() -> None:
    settings = make_text_settings(torch.zeros(1, 7, dtype=torch.int64), 9)

    assert (settings["min_new_tokens"], settings["max_new_tokens"]) == (9, 9)
    assert settings["attention_mask"].shape == (1, 7)
    assert settings["do_sample"] is False
