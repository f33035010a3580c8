"""Turns a recovery log into few large steps: the tensors of a replay, nothing else."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol.recovery_log import ReplayPiece


@dataclass(frozen=True)
class ReplayStep:
    """Hidden states to send at `position`; rows are in their present order."""

    position: int
    hidden_BTH: Tensor
    is_decoded: bool


def merge_pieces(
    pieces: Iterable[ReplayPiece[Tensor]], max_tokens: int
) -> Iterator[ReplayStep]:
    """Join neighbouring pieces into steps of at most `max_tokens` tokens per row.

    Prompts and generated tokens are not joined: a peer may compute the two differently, and a
    rebuilt cache must hold what the lost one held.
    """
    group: list[ReplayPiece[Tensor]] = []
    num_tokens = 0
    for piece in pieces:
        if group and (
            piece.is_decoded != group[0].is_decoded or num_tokens + piece.num_tokens > max_tokens
        ):
            yield _join(group)
            group, num_tokens = [], 0
        group.append(piece)
        num_tokens += piece.num_tokens
    if group:
        yield _join(group)


def _join(group: list[ReplayPiece[Tensor]]) -> ReplayStep:
    parts = [_select(piece) for piece in group]
    hidden_BTH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return ReplayStep(group[0].position, hidden_BTH, group[0].is_decoded)


def _select(piece: ReplayPiece[Tensor]) -> Tensor:
    hidden_BTH = piece.payload[:, : piece.num_tokens]
    return hidden_BTH if piece.rows is None else hidden_BTH[list(piece.rows)]
