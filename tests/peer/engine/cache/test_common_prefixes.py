"""What is said to be the same is the same, and most of what is the same is known."""

import random

import pytest

from shoal.peer.engine.cache.kv_cache import CommonPrefixes


def count_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_the_same_as_far_as_is_said(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(1, 6)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    prefixes = CommonPrefixes(num_rows)
    for _ in range(200):
        event = rng.random()
        if event < 0.5:
            num_tokens = rng.randint(1, 3)
            for row in rows:
                row += [rng.randrange(1000) for _ in range(num_tokens)]
        elif event < 0.6:
            length = rng.randint(0, len(rows[0]))
            rows = [row[:length] for row in rows]
            prefixes.truncate(length)
        else:
            row_map = [rng.randrange(num_rows) for _ in range(num_rows)]
            start = prefixes.find_first_difference(row_map)
            for row, source in enumerate(row_map):
                assert row == source or count_common(rows[row], rows[source]) >= min(
                    start, len(rows[0])
                )
            rows = [list(rows[source]) for source in row_map]
            prefixes.reorder(row_map, len(rows[0]))


def test_beams_that_once_forked_differ_in_their_tails_only() -> None:
    prefixes = CommonPrefixes(3)
    prefixes.reorder([1, 1, 1], length=300)
    prefixes.reorder([0, 0, 2], length=305)

    assert prefixes.find_first_difference([1, 0, 2]) == 305
    assert prefixes.find_first_difference([2, 1, 2]) == 300
    assert prefixes.find_first_difference([2, 0, 0]) == 300


def test_rolled_back_rows_may_differ_from_there_on() -> None:
    prefixes = CommonPrefixes(2)
    prefixes.reorder([0, 0], length=300)
    prefixes.truncate(100)

    assert prefixes.find_first_difference([1, 0]) == 100
