"""Replays as tensors, whose values are token ids for an oracle; and how prompts are cut."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shoal.client.session.exchange import merge_pieces
from shoal.client.session.hop_link import Question
from shoal.client.session.pipeline import choose_piece_tokens
from shoal.peer.engine.blocks.batch import count_part_tokens
from shoal.protocol.session.recovery_log import RecoveryLog, ReplayPiece


def make_piece(
    position: int, num_tokens: int, is_decoded: bool = False, rows: tuple[int, ...] | None = None
) -> ReplayPiece[Tensor]:
    """Return a piece of two rows whose values are 1000 * row + position, with a surplus token."""
    tokens_T = torch.arange(position, position + num_tokens + 1)
    payload_BTH = torch.stack([tokens_T, 1000 + tokens_T]).unsqueeze(2)
    return ReplayPiece(position, num_tokens, is_decoded, rows, payload_BTH)


def show(steps: list[Question]) -> list[tuple[int, list[list[int]], bool]]:
    return [(step.position, step.hidden_BTH[..., 0].tolist(), step.is_decoded) for step in steps]


def test_neighbouring_decoded_tokens_become_one_step() -> None:
    pieces = [make_piece(0, 2, True), make_piece(2, 1, True), make_piece(3, 1, True)]

    steps = list(merge_pieces(pieces, 8))

    assert show(steps) == [(0, [[0, 1, 2, 3], [1000, 1001, 1002, 1003]], True)]


def test_prompts_are_sent_again_as_they_were_even_where_a_rollback_cut_them_short() -> None:
    steps = list(merge_pieces([make_piece(0, 2), make_piece(2, 1)], 1))

    assert show(steps) == [
        (0, [[0, 1, 2], [1000, 1001, 1002]], False),
        (2, [[2, 3], [1002, 1003]], False),
    ]


def test_rows_are_put_into_their_present_order() -> None:
    pieces = [make_piece(0, 1, True, rows=(1, 1)), make_piece(1, 1, True, rows=(1, 0))]

    steps = list(merge_pieces(pieces, 8))

    assert show(steps) == [(0, [[1000, 1001], [1000, 1]], True)]


def test_prompts_and_decoded_tokens_stay_apart() -> None:
    kinds = [False, False, True, True, False, True]

    steps = list(merge_pieces([make_piece(i, 1, kind) for i, kind in enumerate(kinds)], 8))

    assert [(step.position, step.is_decoded) for step in steps] == [
        (0, False),
        (1, False),
        (2, True),
        (4, False),
        (5, True),
    ]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 100])
def test_no_step_of_decoded_tokens_is_longer_than_allowed(max_tokens: int) -> None:
    pieces = [make_piece(index, 1, True) for index in range(13)]

    steps = list(merge_pieces(pieces, max_tokens))

    assert all(step.hidden_BTH.shape[1] <= max_tokens for step in steps)
    assert len(steps) == -(-13 // max_tokens)
    joined_BTH = torch.cat([step.hidden_BTH for step in steps], dim=1)
    assert joined_BTH[..., 0].tolist() == [list(range(13)), list(range(1000, 1013))]
    for step, following in pairwise(steps):
        assert step.position + step.hidden_BTH.shape[1] == following.position


def test_nothing_gives_nothing() -> None:
    assert list(merge_pieces([], 8)) == []


@pytest.mark.parametrize("seed", range(12))
def test_merged_replay_rebuilds_the_cache(seed: int) -> None:
    """The oracle is a tensor that goes through the same rollbacks, moves and steps."""
    rng = random.Random(seed)
    num_rows, max_tokens = rng.choice((1, 2, 4)), rng.randint(1, 12)
    log = RecoveryLog[Tensor]()
    cache_BT = torch.zeros(num_rows, 0, dtype=torch.int64)
    decoded: list[bool] = []  # of every token in the cache

    for _ in range(120):
        back = rng.choice((0, 0, 0, 0, rng.randrange(4), rng.randint(0, log.length)))
        position = max(0, log.length - back)
        is_decoded = rng.random() < 0.6
        num_tokens = 1 if is_decoded else rng.randint(1, 5)
        tokens_BT = torch.tensor(
            [[rng.randrange(10**6) for _ in range(num_tokens)] for _ in range(num_rows)]
        )
        row_map = [rng.randrange(num_rows) for _ in range(num_rows)]
        row_map = rng.choice((None, row_map))
        log.append(position, num_tokens, tokens_BT.unsqueeze(2), row_map, is_decoded)
        order = list(range(num_rows)) if row_map is None else row_map
        cache_BT = torch.cat([cache_BT[order, :position], tokens_BT], dim=1)
        decoded[position:] = [is_decoded] * num_tokens

        steps = list(merge_pieces(log.plan_replay(), max_tokens))

        rebuilt_BT = torch.zeros(num_rows, 0, dtype=torch.int64)
        kinds: list[bool] = []
        for step in steps:
            assert step.position <= rebuilt_BT.shape[1]
            tokens_BT = step.hidden_BTH[..., 0]
            rebuilt_BT = torch.cat([rebuilt_BT[:, : step.position], tokens_BT], dim=1)
            kinds[step.position :] = [step.is_decoded] * tokens_BT.shape[1]
            assert not step.is_decoded or tokens_BT.shape[1] <= max_tokens
        # What is left over of a prompt that was rolled back goes with the next step.
        assert torch.equal(rebuilt_BT[:, : log.length], cache_BT)
        assert kinds[: log.length] == decoded


# ---- the size of pieces of a prompt


@pytest.mark.parametrize(
    ("num_hops", "num_rows", "rtt_seconds", "most", "expected"),
    [
        (1, 1, 10.0, 2048, 2048),
        (2, 1, 0.0, 2048, 128),
        (2, 4, 0.0, 2048, 32),
        (2, 256, 0.0, 2048, 1),
        (3, 1, 0.2, 2048, 512),
        (3, 1, 99.0, 2048, 2048),
        (3, 1, 0.0, 100, 64),
        (1, 1, 0.0, 1, 1),
    ],
)
def test_pieces_are_small_where_hops_are_near(
    num_hops: int, num_rows: int, rtt_seconds: float, most: int, expected: int
) -> None:
    assert choose_piece_tokens(num_hops, num_rows, rtt_seconds, 1000.0, most) == expected


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 64, 100, 256])
@pytest.mark.parametrize("rtt_seconds", [0.0, 0.01, 0.15, 2.0])
def test_pieces_end_where_the_parts_of_a_peer_end(num_rows: int, rtt_seconds: float) -> None:
    piece = choose_piece_tokens(2, num_rows, rtt_seconds, 777.0, 2048)

    assert piece % count_part_tokens(num_rows) == 0
