"""Hidden states of a replay: parts of what was sent, with their rows moved, as one tensor."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Piece(Protocol):
    """What to take of a tensor: see `protocol.recovery_log.ReplayPiece`."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def is_decoded(self) -> bool: ...
    @property
    def rows(self) -> tuple[int, ...] | None: ...
    @property
    def payload(self) -> Tensor: ...


def join_pieces(group: Sequence[Piece]) -> Tensor:
    """Return a group of pieces as hidden states [B, T, H]; a piece of a prompt is taken whole."""
    parts = [_select(piece) for piece in group]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _select(piece: Piece) -> Tensor:
    hidden_BTH = piece.payload[:, : piece.num_tokens] if piece.is_decoded else piece.payload
    return hidden_BTH if piece.rows is None else hidden_BTH[list(piece.rows)]
