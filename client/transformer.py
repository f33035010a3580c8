"""The parts of a model between tokens and head, some of them on other machines."""

import torch
from torch import Tensor, nn

from .local_layers import LocalLayers
from .remote_blocks import RemoteSequential

# Shape suffixes: B rows, T tokens, H hidden size.


class DistributedTransformer(nn.Module):
    """The parts of the model under the names that PETALS gives them on every architecture."""

    def __init__(self, layers: LocalLayers, blocks: RemoteSequential) -> None:
        super().__init__()
        self.word_embeddings = layers.embedding
        self.word_embeddings_layernorm = layers.embedding_norm or nn.Identity()
        self.position_embeddings = layers.positions
        self.h = blocks
        self.ln_f = layers.norm

    def get_input_embeddings(self) -> nn.Module:
        """Return what makes vectors of tokens; transformers asks by this name."""
        return self.word_embeddings

    def add_positions(self, hidden_BTH: Tensor, position: int) -> Tensor:
        """Add learned positions from `position` on; most families have none."""
        if self.position_embeddings is None:
            return hidden_BTH
        stop = position + hidden_BTH.shape[1]
        positions_T = torch.arange(position, stop, device=hidden_BTH.device)
        return hidden_BTH + self.position_embeddings(positions_T).to(hidden_BTH.dtype)
