"""Deep prompts on their way to peers: checked, shared by all rows, cut for a hop.

Tensor suffixes: B rows, T tokens, H hidden, L blocks, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.wire_tensors import encode_as, has_only_finite
from ...protocol.errors import UsageError
from ...protocol.ids import PassId, SessionId
from ...protocol.limits import MAX_PASS_PROMPTS
from ...protocol.messages.passes import PassPiece, Slot, cut_vectors
from ...protocol.tensors import WireDtype, WireTensor


def check_prompts(prompts: Tensor, num_blocks: int, hidden_BTH: Tensor) -> None:
    """Raise UsageError unless these can be deep prompts of so many blocks and these inputs."""
    num_rows, num_tokens, hidden_size = hidden_BTH.shape
    fits = (
        prompts.ndim == 4
        and prompts.is_floating_point()
        and prompts.shape[0] == num_blocks
        and prompts.shape[1] in (1, num_rows)
        and 0 < prompts.shape[2] <= num_tokens
        and prompts.shape[3] == hidden_size
    )
    if not fits:
        raise UsageError(
            "deep prompts must be floats of shape [blocks, rows, tokens, hidden size]: here of "
            f"{num_blocks} blocks, {num_rows} rows or one for all, at most {num_tokens} tokens and "
            f"hidden size {hidden_size}; got {list(prompts.shape)} of {prompts.dtype}"
        )
    if num_blocks * prompts.shape[2] > MAX_PASS_PROMPTS:
        raise UsageError(
            f"deep prompts of {prompts.shape[2]} tokens are too long for {num_blocks} blocks: the "
            f"product may be at most {MAX_PASS_PROMPTS}"
        )


def share_prompts(prompts_LBPH: Tensor) -> Tensor:
    """Return the prompts of a session in float32, [L, 1, P, H] where all rows have the same.

    Raises UsageError for NaN and infinity.
    """
    prompts = prompts_LBPH.detach().to("cpu", torch.float32)
    if not has_only_finite(prompts):
        raise UsageError("the deep prompts contain NaN or infinity")
    is_same = bool((prompts == prompts[:, :1]).all())
    return (prompts[:, :1] if is_same else prompts).clone()


def check_rows_stay(prompts_LBPH: Tensor, row_map: Sequence[int] | None) -> None:
    """Raise UsageError where rows would move whose prompts differ: a prompt stays where it is.

    A replay rebuilds a cache with rows in their newest order; prompts would need the same history.
    """
    if prompts_LBPH.shape[1] == 1 or row_map is None:
        return
    if list(row_map) != list(range(len(row_map))):
        raise UsageError(
            "rows with different deep prompts cannot be reordered; for beam search, give all rows "
            "the same prompts, or use one session per prompt"
        )


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether these are the same prompts, or none."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def encode_prompts(session: SessionId, prompts_LBPH: Tensor, dtype: WireDtype) -> list[PassPiece]:
    """Return the pieces that follow the `Open` of a session."""
    width = prompts_LBPH.shape[-1]
    vectors_NH = prompts_LBPH.reshape(-1, width)
    pieces: list[PassPiece] = []
    for part in cut_vectors(len(vectors_NH), dtype, width):
        data = encode_as(dtype.name, vectors_NH[part.start : part.stop])
        wire = WireTensor(dtype, 1, len(part), width, data)
        pieces.append(PassPiece(PassId(session), Slot.PROMPTS, part.start, wire))
    return pieces
