"""The parts of a model between tokens and head, some of them on other machines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..training.tuning import DEEP, Tuning, lay_out_deep_prompts, make_deep_prompts, make_prompt
from .local_layers import LocalLayers
from .remote_blocks import RemoteSequential

# Shape suffixes: B rows, T tokens, H hidden size, L blocks, P tokens of a prompt.


class DistributedTransformer(nn.Module):
    """The parts of the model under the names that PETALS gives them on every architecture."""

    def __init__(
        self, layers: LocalLayers, blocks: RemoteSequential, tuning: Tuning | None = None
    ) -> None:
        super().__init__()
        tuning = tuning or Tuning()
        self.word_embeddings = layers.embedding
        self.word_embeddings_layernorm = layers.embedding_norm or nn.Identity()
        self.position_embeddings = layers.positions
        self.prompt_embeddings: nn.Embedding | None = None
        self.intermediate_prompt_embeddings: nn.Embedding | None = None
        if tuning.mode is not None:
            self.prompt_embeddings = make_prompt(tuning.pre_seq_len, layers.embedding)
        if tuning.mode == DEEP:
            self.intermediate_prompt_embeddings = make_deep_prompts(
                tuning.pre_seq_len, len(blocks), layers.embedding.embedding_dim
            )
        self.h = blocks
        self.ln_f = layers.norm

    def get_input_embeddings(self) -> nn.Module:
        """Return what makes vectors of tokens; transformers asks by this name."""
        return self.word_embeddings

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens of a trained prompt stand before a text."""
        return 0 if self.prompt_embeddings is None else self.prompt_embeddings.num_embeddings

    @property
    def deep_prompts(self) -> Tensor | None:
        """What is added to the first inputs of each block, [L, 1, P, H], where that is trained."""
        if self.intermediate_prompt_embeddings is None:
            return None
        return lay_out_deep_prompts(self.intermediate_prompt_embeddings.weight, len(self.h))

    def prepare(self, embeddings_BTH: Tensor, position: int) -> Tensor:
        """Return the input of the first block: at the beginning of a text, behind the prompt."""
        if self.prompt_embeddings is not None and position == 0:
            prompt_PH = self.prompt_embeddings.weight.to(embeddings_BTH.dtype)
            prompts_BPH = prompt_PH.expand(len(embeddings_BTH), -1, -1)
            embeddings_BTH = torch.cat([prompts_BPH, embeddings_BTH], dim=1)
        hidden_BTH = self.word_embeddings_layernorm(embeddings_BTH)
        if self.position_embeddings is None:  # as in most families
            return hidden_BTH
        return self.position_embeddings(hidden_BTH, position)
