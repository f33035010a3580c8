"""One block of a model on this machine, as transformers' own layer, to compare with remote ones."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.checkpoints.conversion import ConvertedCheckpoint
from ...models.shells.shell_opening import open_block_shell
from ...models.shells.step_cache import CACHE_NAME, StepCache
from ...protocol.errors import UsageError
from .local_layers import open_checkpoint, resolve_dtype

# Shape suffixes: B rows, T tokens, H hidden size, G heads, D size of a head.


_given: ContextVar[Tensor] = ContextVar("given hidden states")
"""The input of a block in this thread, whatever its decoder has made of it: positions or a norm
belong to the embedding."""


class BlockPast:
    """Keys and values of the tokens that a block has seen."""

    def __init__(self) -> None:
        self._keys_BGTD: Tensor | None = None
        self._values_BGTD: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of these tokens."""
        return 0 if self._keys_BGTD is None else self._keys_BGTD.shape[2]

    def put(self, position: int, keys_BGTD: Tensor, values_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of new tokens; return all."""
        if self._keys_BGTD is not None and self._values_BGTD is not None:
            keys_BGTD = torch.cat([self._keys_BGTD, keys_BGTD], dim=2)
            values_BGTD = torch.cat([self._values_BGTD, values_BGTD], dim=2)
        self._keys_BGTD, self._values_BGTD = keys_BGTD, values_BGTD
        return keys_BGTD, values_BGTD


class PretrainedBlock(nn.Module):
    """A block with frozen weights on the CPU, differentiable with respect to its input."""

    def __init__(self, decoder: Any, layer: nn.Module) -> None:
        """`decoder` is a model whose only block is `layer`."""
        super().__init__()
        self.layer = layer
        layer.register_forward_pre_hook(_take_given, with_kwargs=True)
        # Not a module of this one: its embedding and head have no weights.
        object.__setattr__(self, "_decoder", decoder)

    def forward(
        self, inputs: Tensor, layer_past: BlockPast | None = None, use_cache: bool = False
    ) -> tuple[Tensor] | tuple[Tensor, BlockPast]:
        """Return the block's output for hidden states [B, T, H], in a tuple.

        With `use_cache`, the tuple also holds the `layer_past` for following tokens.
        """
        past = BlockPast() if layer_past is None else layer_past
        cache = StepCache(past.num_tokens, past.put)
        decoder: Any = self._decoder
        token = _given.set(inputs)
        try:
            output = decoder(inputs_embeds=inputs, use_cache=True, **{CACHE_NAME: cache})
        finally:
            _given.reset(token)
        hidden_BTH: Tensor = output.last_hidden_state
        return (hidden_BTH, past) if use_cache else (hidden_BTH,)


def load_pretrained_block(
    model: str | Path,
    block_index: int,
    *,
    torch_dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    config: object = None,
) -> PretrainedBlock:
    """Read one block of a model directory or Hub id; "auto" keeps the checkpoint's dtype.

    Supports every family that a swarm can serve. `config` has no effect: it is read from the
    directory. Raises ModelError if the model cannot be used, UsageError for a block that it does
    not have.
    """
    checkpoint, _ = open_checkpoint(model, revision)
    shell = open_block_shell(checkpoint.config)
    if not 0 <= block_index < len(shell.layers):
        raise UsageError(f"the model has blocks 0:{len(shell.layers)}, not {block_index}")
    converted = ConvertedCheckpoint(checkpoint, shell.model)
    shell.load_layer(converted, block_index, resolve_dtype(torch_dtype))
    return PretrainedBlock(shell.cut([block_index]), shell.layers[block_index])


def _take_given(
    layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have a block run on what it was given."""
    if arguments:
        return (_given.get(), *arguments[1:]), options
    return arguments, {**options, "hidden_states": _given.get()}
