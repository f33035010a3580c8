"""Checks that a decoder calls a block with the same arguments alone as among all blocks.

The blocks are replaced by recorders, so no weights are needed. Tensor suffixes: B rows, T tokens,
H hidden.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .shell import Shell
from .step_cache import CACHE_NAME, StepCache

_TOKENS = 3
_MOST_POSITIONS = 2**14
"""The check runs behind so many positions, if the model has them: beyond most windows."""

_RUN_ERRORS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors of a decoder that expects another return value of its blocks."""

Call = tuple[tuple[object, ...], dict[str, object]]
"""Arguments of a block, by place and by name."""


@torch.no_grad()
def gives_blocks_the_same_alone(shell: Shell) -> bool:
    """Return whether each block alone is called as it is among all, with unchanged hidden states.

    The decoder must also pass the output of a block, and nothing else, to the next one.
    """
    hidden_BTH = torch.linspace(-3, 3, _TOKENS * shell.config.hidden_size).view(1, _TOKENS, -1)
    most = getattr(shell.config, "max_position_embeddings", None) or _MOST_POSITIONS
    position = max(min(most, _MOST_POSITIONS) - _TOKENS, 0)
    whole = list(range(len(shell.layers)))
    # Blocks return their output plainly, or in a tuple.
    for pack in (lambda hidden_BTH: hidden_BTH, lambda hidden_BTH: (hidden_BTH,)):
        calls = _record(shell, whole, hidden_BTH, position, pack)
        if calls is not None:
            return all(
                _are_same(_record(shell, [index], hidden_BTH, position, pack), [calls[index]])
                for index in whole
            )
    return False


def _record(
    shell: Shell,
    indices: list[int],
    hidden_BTH: Tensor,
    position: int,
    pack: Callable[[object], object],
) -> list[Call] | None:
    """Return the calls of blocks that return their input; None if the decoder loses that."""
    decoder: Any = shell.cut(indices)
    for name, part in decoder.named_children():
        # Some tables change with the length of a text.
        if name != shell.layers_name and part is not shell.model.get_input_embeddings():
            setattr(decoder, name, copy.deepcopy(part))
    calls = list[Call]()

    def record(*arguments: object, **options: object) -> object:
        calls.append((arguments, options))
        return pack(arguments[0] if arguments else options["hidden_states"])

    layers = list[nn.Module]()
    for layer in getattr(decoder, shell.layers_name):
        stand_in = copy.copy(layer)
        stand_in.forward = record
        layers.append(stand_in)
    setattr(decoder, shell.layers_name, nn.ModuleList(layers))
    cache = StepCache(position)
    try:
        output = decoder(inputs_embeds=hidden_BTH, use_cache=True, **{CACHE_NAME: cache})
    except _RUN_ERRORS:
        return None
    is_kept = _are_same(output.last_hidden_state, hidden_BTH) and len(calls) == len(indices)
    return calls if is_kept else None


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_same(*pair) for pair in pairs)
    return isinstance(one, Cache) or one == other
