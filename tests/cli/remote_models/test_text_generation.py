"""Tokens become text, settings become arguments."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from announcements import describe_peer
from fake_hub import READ_HUB_SETTINGS, serving_hub
from transformers import AutoTokenizer

from shoal.cli.remote_models.generation_options import Sampling
from shoal.cli.remote_models.opening import load_tokenizer
from shoal.cli.remote_models.routes import (
    describe_failover,
    describe_pass_failover,
    failover_facts,
)
from shoal.cli.remote_models.text_generation import (
    Detokenizer,
    Generation,
    TokenStream,
    generate_text,
)
from shoal.client import AutoDistributedModelForCausalLM
from shoal.client.routing.route import Hop
from shoal.client.trace.trace import SessionFailover
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import ModelError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.spans import Span

TEXT = "Zoë said: “naïve” … 日本, 🦈 and more"


def test_assembler_shows_letters_only_when_all_their_bytes_are_there(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer(TEXT).input_ids
    detokenizer = Detokenizer(byte_tokenizer, byte_tokenizer("a prompt: ").input_ids)

    pieces = [detokenizer.add(token_id) for token_id in ids] + [detokenizer.finish()]

    assert len(ids) > len(TEXT)
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert all(len(piece) <= 1 for piece in pieces)


def test_assembler_shows_a_letter_cut_short_at_the_end(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("a🦈").input_ids
    detokenizer = Detokenizer(byte_tokenizer, [])

    shown = "".join(detokenizer.add(token_id) for token_id in ids[:-1])

    assert shown == "a"
    assert detokenizer.finish().startswith("\ufffd")


def test_stream_leaves_out_the_prompt(byte_tokenizer: Any) -> None:
    shown: list[str] = []
    stream = TokenStream(Detokenizer(byte_tokenizer, [1, 2]), shown.append)

    stream.put(torch.tensor([[1, 2]]))
    for token_id in byte_tokenizer("hi").input_ids:
        stream.put(torch.tensor([token_id]))
    stream.end()

    assert "".join(shown) == "hi"
    assert stream.token_ids == byte_tokenizer("hi").input_ids


def test_sampling_is_greedy_unless_it_is_asked_for() -> None:
    assert Sampling().to_arguments()["do_sample"] is False
    assert Sampling(temperature=0.0, top_p=0.5).to_arguments() == {
        "max_new_tokens": 64,
        "num_beams": 1,
        "do_sample": False,
    }
    assert Sampling(seed=1).to_arguments()["do_sample"] is True
    assert Sampling(top_k=3).to_arguments()["top_k"] == 3
    assert Sampling(min_p=0.1).to_arguments()["do_sample"] is True


def test_text_ends_before_the_first_stop(swarm_model: Any) -> None:
    model, tokenizer = swarm_model
    pieces: list[str] = []

    def tell(sampling: Sampling) -> Generation:
        pieces.clear()
        prompt = "Once upon a time"
        return generate_text(model, tokenizer, prompt, sampling, pieces.append, lambda _: None)

    whole = tell(Sampling(24))
    stop = whole.text[20:29]  # in the middle of words
    cut = tell(Sampling(24, stops=["not in there", stop]))

    assert not whole.is_complete
    assert cut.text == "".join(pieces) == whole.text[: whole.text.index(stop)]
    assert (cut.stop, whole.stop) == (stop, "")
    assert cut.is_complete
    assert len(cut.token_ids) < 24
    # Not in the text, though in the prompt and the text together.
    assert tell(Sampling(24, stops=["time" + whole.text[:2]])).text == whole.text
    beams = tell(Sampling(24, num_beams=2, stops=[" "]))
    assert beams.text.count(" ") == 0


def test_prompt_may_hold_the_padding_token(swarm_model: Any) -> None:
    model, tokenizer = swarm_model
    prompt = "Once upon a time"
    model.generation_config.pad_token_id = tokenizer(prompt).input_ids[-2]

    text = generate_text(model, tokenizer, prompt, Sampling(4), print, lambda _: None)

    assert len(text.token_ids) == 4


@pytest.fixture
def swarm_model() -> Iterator[tuple[Any, Any]]:
    """The bundled model over a swarm in this process, and its tokenizer."""
    path = Path(__file__).resolve().parents[3] / "models" / "shoal-stories"
    swarm = LoopbackSwarm(path, [(0, 8)])
    tokenizer = AutoTokenizer.from_pretrained(path)
    with AutoDistributedModelForCausalLM.from_pretrained(path, connect=swarm.connect) as model:
        yield model, tokenizer


def test_model_without_a_tokenizer_is_refused(byte_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(byte_model, directory, ignore=shutil.ignore_patterns("*token*"))

    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(str(directory))


def test_model_with_a_damaged_tokenizer_is_refused(byte_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(byte_model, tmp_path / "model")
    (directory / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')

    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be loaded: "):
        load_tokenizer(str(directory))


HUB_SCRIPT = """
from shoal.cli.remote_models.opening import load_tokenizer
from shoal.models.checkpoints.checkpoint import Checkpoint

tokenizer, revision = load_tokenizer("org/model")
print(tokenizer.eos_token, revision, Checkpoint.open("org/model", revision).revision)
"""


@pytest.mark.network
@pytest.mark.slow
def test_tokenizer_is_that_of_the_models_revision_while_the_branch_moves_on(
    byte_model: Path, tmp_path: Path
) -> None:
    revisions = {commit * 40: tmp_path / commit for commit in "ab"}
    for commit, folder in revisions.items():
        shutil.copytree(byte_model, folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        changed = {**settings, "eos_token": f"<end of {commit[0]}>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))

    with serving_hub(revisions) as hub:
        done = warm_python.run(
            [sys.executable, "-P", "-c", READ_HUB_SETTINGS + HUB_SCRIPT],
            env={**os.environ, **hub.make_environment(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        moved_to = hub.main

    assert done.stdout.split("\n")[0] == f"<end of a> {'a' * 40} {'a' * 40}", done.stderr
    assert moved_to == "b" * 40


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", "x"), ("num_hidden_layers", "8"), ("num_attention_heads", 0)],
)
def test_damaged_configuration_is_named_before_the_tokenizer_reads_it(
    byte_model: Path, tmp_path: Path, name: str, value: object
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(byte_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, name: value}))

    with pytest.raises(ModelError, match=f"^config.json: {name} must be"):
        load_tokenizer(str(directory))


def make_failover(before: str, after: str) -> SessionFailover:
    lost, replacement = (
        describe_peer(
            peer_id=Identity(bytes([number]) * 32).peer_id, model_id=ModelId("a" * 32),
            num_blocks=8, span=Span(0, 8), weights=weights, issued_at=0.0, expires_at=1.0,
        )
        for number, weights in ((1, before), (2, after))
    )  # fmt: skip
    hop = Hop(replacement, Span(0, 8))
    return SessionFailover(Hop(lost, Span(0, 8)), "it is gone", "was lost", (hop,), 40, 40, 0.25)


def test_failover_is_told_with_the_weights_that_changed_and_whether_the_peer_is_lost() -> None:
    to_others, to_the_same = make_failover("int8", "fp32"), make_failover("int8", "int8")
    without_room = replace(to_the_same, what_happened="had no room")

    assert "fp32 weights instead of int8: the text may differ" in describe_failover(to_others)
    assert failover_facts(to_others)["changed_weights"] == "fp32"
    assert "[0:8] was lost, …" in describe_failover(to_the_same)
    assert describe_failover(to_the_same).endswith("took over after 0.25 s")
    assert failover_facts(to_the_same)["changed_weights"] is None
    assert "[0:8] had no room, …" in describe_failover(without_room)


def test_peer_that_goes_on_itself_takes_over_from_nobody() -> None:
    failover = make_failover("int8", "int8")
    again = replace(failover, replacements=(failover.lost,), what_happened="had no room")

    assert describe_failover(again).endswith("[0:8] had no room, and went on itself after 0.25 s")
    assert describe_pass_failover(3, again).endswith("[0:8] had no room, and went on itself")
    assert failover_facts(again)["replaced_by"] == [
        {"peer_id": failover.lost.peer.peer_id, "span": "0:8"}
    ]
