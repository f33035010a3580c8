"""Turns of a conversation continue in one session, and an answer that was cut stays in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from screens import Screen
from transformers import AutoTokenizer

from shoal.cli.commands.chat import Conversation, _read_lines
from shoal.cli.remote_models.generation_options import Sampling
from shoal.cli.remote_models.opening import OpenedModel
from shoal.cli.remote_models.text_generation import Generation, generate_text
from shoal.cli.terminal.terminal import Terminal
from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import UsageError

TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def opened() -> Iterator[OpenedModel]:
    """The bundled model over a swarm in this process, and its tokenizer."""
    path = Path(__file__).resolve().parents[3] / "models" / "shoal-stories"
    swarm = LoopbackSwarm(path, [(0, 8)])
    tokenizer = AutoTokenizer.from_pretrained(path)
    with AutoDistributedModelForCausalLM.from_pretrained(path, connect=swarm.connect) as model:
        yield OpenedModel(model, tokenizer, False, 20.0)


class Talk:
    """A conversation, and the sessions that it took."""

    def __init__(self, opened: OpenedModel, max_length: int = 256) -> None:
        self.conversation = Conversation(opened, Sampling(12), max_length)
        self.sessions: list[Any] = []
        self.pieces: list[str] = []

    def say(self, line: str, num_tokens: int = 100) -> Generation:
        def take(piece: str) -> None:
            self.pieces.append(piece)
            if len(self.pieces) == num_tokens:
                raise KeyboardInterrupt

        self.pieces.clear()
        return self.conversation.answer(line, take, self.sessions.append)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_turns_are_one_text_that_continues_in_its_session(
    opened: OpenedModel, template: str | None
) -> None:
    tokenizer: Any = opened.tokenizer
    tokenizer.chat_template = template
    talk = Talk(opened)

    first = talk.say("Once upon a time")
    second = talk.say("Then Mia")

    if template is None:
        whole = f"Once upon a time{first.text}\nThen Mia"
    else:
        whole = f"user: Once upon a time\nassistant: {first.text}\nuser: Then Mia\nassistant:"
    expected = generate_text(opened.model, tokenizer, whole, Sampling(12), lambda piece: None)
    assert second.text == expected.text
    assert talk.sessions[0] is talk.sessions[1]
    assert talk.conversation.has_template is (template is not None)


def test_answer_that_is_interrupted_stays_as_far_as_it_came(opened: OpenedModel) -> None:
    talk = Talk(opened)
    talk.say("Once upon a time")

    with pytest.raises(KeyboardInterrupt):
        talk.say("Then Mia", num_tokens=4)
    cut = "".join(talk.pieces)
    answer = talk.say("At last")

    whole = "".join(turn["content"] for turn in talk.conversation._turns[:2])
    expected = generate_text(
        opened.model, opened.tokenizer, f"{whole}\nThen Mia{cut}\nAt last", Sampling(12),
        lambda piece: None,
    )  # fmt: skip
    assert answer.text == expected.text
    assert len(set(map(id, talk.sessions))) == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_that_go_to_a_pipe_are_not_mixed_with_the_prompt(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, said = list[str](), iter(["one", " ", "two"])

    def read(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    output = Terminal(Screen(is_terminal=is_terminal))

    assert list(_read_lines(output, Terminal(Screen()), True)) == ["one", "two"]
    assert prompts == ["> " if is_terminal else ""] * 4


def test_full_conversation_says_so_and_begins_anew_when_it_is_reset(opened: OpenedModel) -> None:
    talk = Talk(opened, max_length=40)
    first = talk.say("Once upon a time")
    with pytest.raises(UsageError, match=r"full at 40 \(--max-length\); .* /reset"):
        talk.say("and then " * 20)
    talk.say("so")  # nothing was said before

    talk.conversation.reset()

    assert talk.say("Once upon a time").text == first.text
    assert talk.sessions[-1] is not talk.sessions[0]
