"""The adapters that a pass names: found, checked, and their gradients as vectors for the wire.

Tensor suffixes: N vectors, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import Holder
from ...protocol.ids import AdapterId
from ...protocol.messages.passes import Pass
from ..accounts.adapter_shelf import AdapterShelf, Kept
from ..engine.adapters.adapter import Adapter
from ..engine.adapters.trained_adapter import GatheredGradients

Adapters = tuple[Adapter | None, ...]
"""One for each row, or none at all."""

_FLOAT_BYTES = 4


def find_kept(message: Pass, shelf: AdapterShelf, holder: Holder) -> dict[AdapterId, Kept]:
    """Return the adapters that a pass names, each once.

    Raises RefusedError with UNKNOWN_ADAPTER: whoever has it may bring it again.
    """
    names = dict.fromkeys(run.adapter for run in message.adapters if run.adapter)
    return {name: shelf.find(name, holder) for name in names}


def find_gathered(message: Pass, kept: Mapping[AdapterId, Kept]) -> GatheredGradients | None:
    """Return where the gradients of a pass are added to; None where that is not asked for.

    Raises RefusedError unless the peer trains the adapter.
    """
    if message.gather is None:
        return None
    (one,) = kept.values()  # check_message made sure
    if one.trained is None:
        detail = "this peer was not asked to train the adapter"
        raise RefusedError(ErrorCode.BAD_VALUES, detail)
    return one.trained.gathered


def cut_adapters(message: Pass, kept: Mapping[AdapterId, Kept]) -> Adapters:
    """Return what the adapters of a pass have for its blocks, row by row."""
    found = {name: one.adapter.cut(message.span) for name, one in kept.items()}
    return tuple(found.get(run.adapter) for run in message.adapters for _ in range(run.num_rows))


def check_adapters(message: Pass, adapters: Adapters, width: int, most_bytes: int) -> int:
    """Return the bytes that a pass needs for its adapters.

    Raises RefusedError when their gradients do not fill as many vectors as the client expects, or
    take more than `most_bytes`, however few texts there are: on the way there already, if they will
    be asked for.
    """
    wants_gradients = message.adapter_vectors > 0 or message.gather is not None
    if not wants_gradients and not message.trains_adapters:
        return 0
    num_numbers = sum(adapter.num_numbers for adapter in _list(adapters))
    if message.adapter_vectors and -(-num_numbers // width) != message.adapter_vectors:
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            f"the gradients of these adapters are {num_numbers} numbers for blocks {message.span}, "
            f"which do not fill {message.adapter_vectors} vectors of {width}",
        )
    check_trained(num_numbers, most_bytes)
    # Copies of the matrices, and their gradients.
    return 2 * num_numbers * _FLOAT_BYTES if wants_gradients else 0


def check_trained(num_numbers: int, most_bytes: int) -> None:
    """Raise RefusedError where the gradients of so many numbers of adapters take too much memory.

    No microbatch makes them smaller, and asking again does not help.
    """
    if num_numbers * _FLOAT_BYTES > most_bytes:
        raise RefusedError(
            ErrorCode.NO_ROOM_FOR_ADAPTER,
            f"this peer has memory to train {most_bytes // _FLOAT_BYTES:,} numbers of adapters at "
            f"once, and its blocks have {num_numbers:,} of them; train a smaller rank or fewer "
            "modules",
        )


def join_gradients(
    adapters: Adapters, gradients: Mapping[Adapter, Mapping[str, Tensor]], width: int
) -> Tensor:
    """Return gradients one behind the other, [N, H]: by adapter, as rows name them, and by name.

    The last vector is filled up with zeros.
    """
    flat = [
        matrix.reshape(-1)
        for adapter in _list(adapters)
        for _, matrix in sorted(gradients[adapter].items())
    ]
    joined = torch.cat(flat)
    return F.pad(joined, (0, -len(joined) % width)).view(-1, width)


def _list(adapters: Adapters) -> Sequence[Adapter]:
    return [adapter for adapter in dict.fromkeys(adapters) if adapter is not None]
