"""Tokens become text, settings become arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.text_generation import Sampling, TextAssembler, TextModel, TokenStream
from shoal.protocol.errors import ModelError

TEXT = "Zoë said: “naïve” … 日本, 🦈 and more"


def test_assembler_shows_letters_only_when_all_their_bytes_are_there(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer(TEXT).input_ids
    assembler = TextAssembler(byte_tokenizer, byte_tokenizer("a prompt: ").input_ids)

    pieces = [assembler.add(token_id) for token_id in ids] + [assembler.finish()]

    assert len(ids) > len(TEXT)
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert all(len(piece) <= 1 for piece in pieces)


def test_assembler_shows_a_letter_cut_short_at_the_end(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("a🦈").input_ids
    assembler = TextAssembler(byte_tokenizer, [])

    shown = "".join(assembler.add(token_id) for token_id in ids[:-1])

    assert shown == "a"
    assert assembler.finish().startswith("\ufffd")


def test_stream_leaves_out_the_prompt(byte_tokenizer: Any) -> None:
    shown: list[str] = []
    stream = TokenStream(TextAssembler(byte_tokenizer, [1, 2]), shown.append)

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


def test_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ModelError, match="has no tokenizer"):
        TextModel.open(str(tmp_path), ["/ip4/127.0.0.1/tcp/1/p2p/x"])
