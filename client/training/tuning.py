"""Prompt tuning: trained vectors before a text, and inside of frozen blocks.

Tensor suffixes: B rows, T tokens, H hidden, L blocks, P tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...protocol.errors import UsageError
from ..settings.client_config import make_whole

SHALLOW = "ptune"
"""A trained prompt stands before each text, as if it were words."""

DEEP = "deep_ptune"
"""As well, another one is added to the inputs of each block at the same places."""


@dataclass(frozen=True)
class Tuning:
    """How a model is tuned by prompts of `pre_seq_len` tokens; with `mode` None it is not."""

    mode: str | None = None
    pre_seq_len: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid combination."""
        if self.mode not in (None, SHALLOW, DEEP):
            raise UsageError(f"tuning_mode must be {SHALLOW} or {DEEP}, not {self.mode!r}")
        length = make_whole("pre_seq_len", self.pre_seq_len)
        if self.mode is None and length != 0:
            raise UsageError(f"pre_seq_len belongs to a tuning_mode: {SHALLOW} or {DEEP}")
        if self.mode is not None and length < 1:
            raise UsageError(f"{self.mode} needs pre_seq_len of at least 1 token, not {length}")

    def check_fits(self, config: PreTrainedConfig) -> None:
        """Raise UsageError when the model has no positions left behind the prompt."""
        maximum = getattr(config, "max_position_embeddings", None)
        if maximum is not None and self.pre_seq_len >= maximum:
            raise UsageError(
                f"pre_seq_len {self.pre_seq_len} leaves no room for a text: the model has "
                f"{maximum} positions"
            )


def make_prompt(num_tokens: int, embedding: nn.Embedding) -> nn.Embedding:
    """Return a prompt to train, [P, H] in float32, that begins as words drawn at random.

    Words are a better beginning than noise (Lester et al., 2021, section 3.2).
    """
    words_P = torch.randint(embedding.num_embeddings, (num_tokens,), device=embedding.weight.device)
    with torch.no_grad():
        prompt_PH = embedding(words_P).float()
    return nn.Embedding.from_pretrained(prompt_PH, freeze=False)


def make_deep_prompts(num_tokens: int, num_blocks: int, hidden_size: int) -> nn.Embedding:
    """Return prompts for the inside of blocks, [P, L * H] in float32, that change nothing yet."""
    return nn.Embedding.from_pretrained(
        torch.zeros(num_tokens, num_blocks * hidden_size), freeze=False
    )


def lay_out_deep_prompts(weight: Tensor, num_blocks: int) -> Tensor:
    """Return [P, L * H] as [L, 1, P, H]: what blocks take, the same for all rows."""
    prompts_PLH = weight.unflatten(1, (num_blocks, -1))
    return prompts_PLH.transpose(0, 1)[:, None]
