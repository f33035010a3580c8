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


def merge_pieces(pieces: Iterable[ReplayPiece[Tensor]], max_tokens: int) -> Iterator[ReplayStep]:
    """Join neighbouring pieces into steps of at most `max_tokens` tokens per row, and cut longer
    ones.

    Prompts and generated tokens are not joined: a peer may compute the two differently, and a
    rebuilt cache must hold what the lost one held.
    """
    group: list[ReplayStep] = []
    num_tokens = 0
    for piece in pieces:
        for part in _cut(piece, max_tokens):
            part_tokens = part.hidden_BTH.shape[1]
            if group and (
                part.is_decoded != group[0].is_decoded or num_tokens + part_tokens > max_tokens
            ):
                yield _join(group)
                group, num_tokens = [], 0
            group.append(part)
            num_tokens += part_tokens
    if group:
        yield _join(group)


def _cut(piece: ReplayPiece[Tensor], max_tokens: int) -> Iterator[ReplayStep]:
    """Yield a piece in parts of at most `max_tokens` tokens, its rows in their present order."""
    hidden_BTH = piece.payload[:, : piece.num_tokens]
    if piece.rows is not None:
        hidden_BTH = hidden_BTH[list(piece.rows)]
    position = piece.position
    for part_BTH in hidden_BTH.split(max_tokens, dim=1):
        yield ReplayStep(position, part_BTH, piece.is_decoded)
        position += part_BTH.shape[1]


def _join(group: list[ReplayStep]) -> ReplayStep:
    if len(group) == 1:
        return group[0]
    hidden_BTH = torch.cat([part.hidden_BTH for part in group], dim=1)
    return ReplayStep(group[0].position, hidden_BTH, group[0].is_decoded)
