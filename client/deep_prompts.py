"""Deep prompts on their way to peers: checked, shared by all rows, cut for a hop.

Tensor suffixes: B rows, T tokens, H hidden, L blocks, P tokens of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.compress import encode_as, has_only_finite
from ..protocol.errors import UsageError
from ..protocol.ids import PassId, SessionId
from ..protocol.limits import MAX_PASS_PROMPTS
from ..protocol.messages import PassPiece, Slot
from ..protocol.passes import cut_vectors
from ..protocol.tensors import WireCodec, WireDtype, WireTensor


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
            f"prompts inside of blocks are floats [{num_blocks}, {num_rows} or 1, 1 to "
            f"{num_tokens}, {hidden_size}] here, got {list(prompts.shape)} of {prompts.dtype}"
        )
    if num_blocks * prompts.shape[2] > MAX_PASS_PROMPTS:
        raise UsageError(
            f"prompts of {prompts.shape[2]} tokens are too long: {num_blocks} blocks times them "
            f"are more than {MAX_PASS_PROMPTS}"
        )


def share_prompts(prompts_LBPH: Tensor) -> Tensor:
    """Return the prompts that all rows of a session have, [L, P, H] in float32.

    Raises UsageError where rows differ: beams move rows, and a prompt stays where it is.
    """
    prompts = prompts_LBPH.detach().to("cpu", torch.float32)
    if not has_only_finite(prompts):
        raise UsageError("the deep prompts contain NaN or infinity")
    if not bool((prompts == prompts[:, :1]).all()):
        raise UsageError(
            "the rows of a session have the same deep prompts; those that differ need sessions of "
            "their own, or no session"
        )
    return prompts[:, 0].clone()


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether these are the same prompts, or none."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def encode_prompts(session: SessionId, prompts_LPH: Tensor, dtype: WireDtype) -> list[PassPiece]:
    """Return the pieces that follow the `Open` of a session."""
    width = prompts_LPH.shape[-1]
    vectors_NH = prompts_LPH.reshape(-1, width)
    pieces: list[PassPiece] = []
    for part in cut_vectors(len(vectors_NH), dtype, width):
        data = encode_as(dtype.name, vectors_NH[part.start : part.stop])
        wire = WireTensor(dtype, WireCodec.RAW, 1, len(part), width, data)
        pieces.append(PassPiece(PassId(session), Slot.PROMPTS, part.start, wire))
    return pieces
