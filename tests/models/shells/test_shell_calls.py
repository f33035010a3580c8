"""A block that would be called otherwise alone than among all is found, and other decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from shoal.models.shells.shell import Shell
from shoal.models.shells.shell_opening import open_shell
from shoal.protocol.errors import ModelError

CONFIG = {
    "model_type": "granite_swa",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "layer_rope_theta": [1e4, 50.0, 0],
    "bos_token_id": 1,
    "eos_token_id": [2, 3, 4],
    "sliding_window": 13,
}


def test_a_cut_decoder_looks_up_what_its_blocks_are_given() -> None:
    shell = open_shell(CONFIG)

    config = shell.cut([2, 1]).config

    assert config.layer_types == ["sliding_attention"] * 2
    assert config.layer_rope_theta == [0, 50.0]
    assert shell.config.layer_rope_theta == [1e4, 50.0, 0]


def keep(name: str) -> Callable[[Shell, list[int], Any], Any]:
    """Have a cut decoder look up `name` as if it had all blocks."""

    def change(shell: Shell, indices: list[int], decoder: Any) -> Any:
        setattr(decoder.config, name, getattr(shell.config, name))
        return decoder

    return change


def scale_between(shell: Shell, indices: list[int], decoder: Any) -> Any:
    """Have a decoder change what is handed on."""
    if len(indices) > 1:
        decoder.norm = nn.LeakyReLU(0.5)
    return decoder


@pytest.mark.parametrize("change", [keep("layer_rope_theta"), keep("layer_types"), scale_between])
def test_a_block_that_is_given_other_things_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Shell, list[int], Any], Any]
) -> None:
    cut = Shell.cut

    def cut_otherwise(shell: Shell, indices: list[int], **options: Any) -> Any:
        return change(shell, indices, cut(shell, indices, **options))

    monkeypatch.setattr(Shell, "cut", cut_otherwise)

    # Of a model that was opened before, the blocks are known.
    config = {**CONFIG, "vocab_size": 129}

    with pytest.raises(ModelError, match="passes other inputs to a single block than to all"):
        open_shell(config)
