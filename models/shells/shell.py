"""Transformers' own implementation of a model, with only those weights that are asked for.

For families that have no file in `models/families`. `shell_opening.py` makes shells.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...protocol.errors import ModelError
from ..checkpoints.checkpoint import Tensors
from .step_cache import CacheShape
from .tables import fill_tables


class NoPositions(nn.Module):
    """Replaces the module of a decoder that adds positions, where they were added before."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return a zero, which changes nothing when it is added."""
        return torch.zeros(())


@dataclass(frozen=True)
class Shell:
    """A causal language model without memory for weights, taken apart at its blocks.

    `cache_shape` is the shape of the keys and values that a block keeps of each token. The output
    of the embedding is multiplied by `embedding_multiplier` before the first block; the module
    `positions_name`, if there is one, adds positions to it.
    """

    model: PreTrainedModel
    decoder_name: str
    layers_name: str
    norm_name: str
    cache_shape: CacheShape
    positions_name: str | None = None
    embedding_multiplier: float = 1.0

    @property
    def config(self) -> PreTrainedConfig:
        """Transformers' configuration of the model."""
        return self.model.config

    @property
    def decoder(self) -> PreTrainedModel:
        """The model below its head."""
        return cast(PreTrainedModel, self.model.get_submodule(self.decoder_name))

    @property
    def layers(self) -> nn.ModuleList:
        """All blocks, without memory."""
        return cast(nn.ModuleList, getattr(self.decoder, self.layers_name))

    def cut(
        self, indices: list[int], *, has_norm: bool = False, has_positions: bool = False
    ) -> PreTrainedModel:
        """Return a decoder with these blocks only; it shares its modules with the shell."""
        decoder = copy.copy(self.decoder)
        decoder._modules = dict(self.decoder._modules)
        config = decoder.config = copy.deepcopy(self.decoder.config)
        config.num_hidden_layers = len(indices)
        # Decoders look up the settings of a block by its index in such a list. Another list that
        # happens to be as long (of token ids, for example) is not read by a decoder.
        for name, values in vars(self.decoder.config).items():
            if isinstance(values, list | tuple) and len(values) == len(self.layers):
                setattr(config, name, type(values)(values[index] for index in indices))
        setattr(decoder, self.layers_name, nn.ModuleList([self.layers[i] for i in indices]))
        if not has_norm:
            setattr(decoder, self.norm_name, nn.Identity())
        if self.positions_name is not None and not has_positions:
            setattr(decoder, self.positions_name, NoPositions())
        return decoder

    def cut_model(self) -> Any:
        """Return a model without blocks and positions; it shares its modules with the shell."""
        *parents, name = self.decoder_name.split(".")
        model = module = copy.copy(self.model)
        for parent in parents:
            module._modules = dict(module._modules)
            child = copy.copy(module.get_submodule(parent))
            setattr(module, parent, child)
            module = child
        module._modules = dict(module._modules)
        setattr(module, name, self.cut([], has_norm=True))
        return model

    def load_layer(self, checkpoint: Tensors, index: int, dtype: torch.dtype | None) -> None:
        """Give one block its weights; None keeps the checkpoint's dtype."""
        layer = self.layers[index]
        self.load(checkpoint, layer, f"{self.layers_name}.{index}.", dtype)

    def load(
        self,
        checkpoint: Tensors,
        module: nn.Module,
        name: str,
        dtype: torch.dtype | None,
    ) -> None:
        """Give a module of the decoder its weights; their names begin with `name`."""
        fill_tables(self.model, module)  # first: it would overwrite weights
        tensors = {}
        for local_name, empty in module.state_dict().items():
            tensor = self.read(checkpoint, name + local_name, tuple(empty.shape))
            kept_dtype = self._choose_dtype(local_name, tensor, dtype)
            tensors[local_name] = tensor.to(kept_dtype, copy=True)
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False).eval()

    def _choose_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        if dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        # Small changes to these change which experts compute a token.
        precise = self.model._keep_in_fp32_modules_strict or ()
        return torch.float32 if any(part in name for part in precise) else dtype

    def read(self, checkpoint: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of the decoder, stored with or without the names of its parents."""
        parents = self.decoder_name.split(".")
        names = [".".join([*parents[first:], name]) for first in range(len(parents) + 1)]
        full_name = next(filter(checkpoint.has, names), names[0])
        tensor = checkpoint.load(full_name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {full_name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
            )
        return tensor
