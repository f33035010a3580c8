"""Turns a recovery log into few large steps: the tensors of a replay, nothing else."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ...kernels.wire_tensors import join_pieces
from ...protocol.session.recovery_log import ReplayPiece, group_pieces


@dataclass(frozen=True)
class ReplayStep:
    """Hidden states to send at `position`; rows are in their present order."""

    position: int
    hidden_BTH: Tensor
    is_decoded: bool


def merge_pieces(pieces: Iterable[ReplayPiece[Tensor]], max_tokens: int) -> Iterator[ReplayStep]:
    """Join pieces into steps, generated tokens together: see `group_pieces`."""
    for group in group_pieces(pieces, max_tokens):
        yield ReplayStep(group[0].position, join_pieces(group), group[0].is_decoded)
