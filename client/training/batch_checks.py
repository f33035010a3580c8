"""What a batch to train on may look like.

Tensor suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...protocol.errors import UsageError

IGNORED = -100
"""The label of a token that is not to be predicted, in torch and in transformers."""


def check_padding(mask_BT: Tensor | None, shape: Sequence[int]) -> None:
    """Raise UsageError unless a mask hides nothing but the ends of rows.

    What is at the end of a row changes nothing before it, and so needs no mask at the peers.
    """
    if mask_BT is None:
        return
    if not isinstance(mask_BT, Tensor) or tuple(mask_BT.shape) != tuple(shape):
        given = list(mask_BT.shape) if isinstance(mask_BT, Tensor) else type(mask_BT).__name__
        raise UsageError(
            f"the attention mask must have the shape of the inputs, {list(shape)}, not {given}"
        )
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise UsageError("the attention mask may only contain 0 and 1")
    if bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):
        raise UsageError(
            "the attention mask hides tokens on the left, which remote blocks do not support; pad "
            "on the right (tokenizer.padding_side = 'right'), where padding changes nothing"
        )


def check_labels(
    labels_BT: Tensor, shape: Sequence[int], vocab_size: int, logits_to_keep: object
) -> None:
    """Raise UsageError unless labels are token ids of this vocabulary, or ignored."""
    if not isinstance(labels_BT, Tensor) or tuple(labels_BT.shape) != tuple(shape):
        given = list(labels_BT.shape) if isinstance(labels_BT, Tensor) else type(labels_BT).__name__
        raise UsageError(f"labels must have the shape of the inputs, {list(shape)}, not {given}")
    if labels_BT.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"labels must be whole numbers, not {labels_BT.dtype}")
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise UsageError("labels need the logits of all tokens; leave logits_to_keep out")
    is_wrong_BT = (labels_BT != IGNORED) & ((labels_BT < 0) | (labels_BT >= vocab_size))
    if bool(is_wrong_BT.any()):
        row, token = is_wrong_BT.nonzero()[0].tolist()
        raise UsageError(
            f"label {int(labels_BT[row, token])} of row {row}, token {token} is out of range: "
            f"labels are token ids from 0 to {vocab_size - 1}, or {IGNORED} for tokens without a "
            "loss"
        )
