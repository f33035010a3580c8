"""Passes in checkpoints that torch calls reentrant, which compute them again on their own.

The first time such a checkpoint computes without a graph, and on the way back once more with one,
wherever backward() was called. Only what is on the stack tells that both are the same pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from ...protocol.errors import UsageError
from ..adapters.adapter_versions import RowAdapters

_FIRST = CheckpointFunction.forward.__code__
_AGAIN = CheckpointFunction.backward.__code__


def check_same_adapters(adapters: RowAdapters) -> None:
    """Note the adapters of a pass in the checkpoints that it is in, the first time.

    When it is computed again, raises UsageError where they are others: the gradients would be
    those of another function, and none of them for the adapters.
    """
    for context, is_again in _find_checkpoints():
        noted: list[RowAdapters] = context.__dict__.setdefault("adapters_of_passes", [])
        if not is_again:
            noted.append(adapters)
        elif noted:
            # From the first pass to the last, for each way back.
            first = noted.pop(0)
            noted.append(first)
            if first != adapters:
                raise make_lost_adapters_error()


def make_lost_adapters_error() -> UsageError:
    """Return what to raise where a pass is computed again with other adapters."""
    return UsageError(
        "gradient checkpointing repeated a pass with other adapters than the first time: choose "
        "the adapter inside the checkpointed function, or call backward() where it is active, and "
        "change its matrices only afterwards"
    )


def _find_checkpoints() -> Iterator[tuple[Any, bool]]:
    """Yield the checkpoints that this is called in, and whether each computes again."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in (_FIRST, _AGAIN):
            yield frame.f_locals["ctx"], frame.f_code is _AGAIN
        frame = frame.f_back
