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
    """Join generated tokens into steps of at most `max_tokens` tokens per row, in order.

    A rebuilt cache must hold what the lost one held, and a peer chooses its arithmetic by the
    size of a step. So the steps of a prompt are sent again as they were: not joined, and where a
    rollback cut one short, whole; the next step begins where the rollback led and has the peer
    forget the rest. Generated tokens are computed one by one however many arrive.
    """
    group: list[ReplayStep] = []
    num_tokens = 0
    for piece in pieces:
        if group and (not piece.is_decoded or num_tokens + piece.num_tokens > max_tokens):
            yield _join(group)
            group, num_tokens = [], 0
        if piece.is_decoded:
            group.append(ReplayStep(piece.position, _select(piece, piece.num_tokens), True))
            num_tokens += piece.num_tokens
        else:
            yield ReplayStep(piece.position, _select(piece, None), False)
    if group:
        yield _join(group)


def _select(piece: ReplayPiece[Tensor], num_tokens: int | None) -> Tensor:
    """Return the first tokens of a piece (None: all), its rows in their present order."""
    hidden_BTH = piece.payload[:, :num_tokens]
    return hidden_BTH if piece.rows is None else hidden_BTH[list(piece.rows)]


def _join(group: list[ReplayStep]) -> ReplayStep:
    if len(group) == 1:
        return group[0]
    hidden_BTH = torch.cat([part.hidden_BTH for part in group], dim=1)
    return ReplayStep(group[0].position, hidden_BTH, is_decoded=True)
