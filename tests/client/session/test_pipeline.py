"""How a prompt is cut into pieces; that they travel well is in test_session."""

import pytest

from shoal.client.session.pipeline import choose_piece_tokens
from shoal.peer.engine.blocks.batch import count_part_tokens


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
