"""Ranges of blocks against sets of integers."""

import itertools
import random

import pytest

from shoal.protocol.spans import Span, find_gaps

SMALL = [Span(start, stop) for start, stop in itertools.combinations(range(6), 2)]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (4, 3), (-1, 2), (-2, -1)])
def test_span_is_never_empty_or_negative(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="start < stop"):
        Span(start, stop)


def test_span_behaves_like_its_set_of_blocks() -> None:
    for span in SMALL:
        blocks = set(range(span.start, span.stop))
        assert len(span) == len(blocks)
        assert {block for block in range(-2, 9) if block in span} == blocks
        assert Span.parse(str(span)) == span


def test_two_spans_behave_like_their_sets_of_blocks() -> None:
    for left, right in itertools.product(SMALL, SMALL):
        left_set, right_set = set(range(left.start, left.stop)), set(range(right.start, right.stop))
        assert left.covers(right) == (right_set <= left_set)
        overlap = left.overlap(right)
        assert overlap == right.overlap(left)
        common = set() if overlap is None else set(range(overlap.start, overlap.stop))
        assert common == left_set & right_set


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1:",
        ":2",
        "3",
        "1-2",
        "a:b",
        "1:2:3",
        "-1:2",
        "1.0:2",
        "2:1",
        "2:2",
        "0x1:4",
        "²:4",
    ],
)
def test_parse_refuses_what_is_not_a_span(text: str) -> None:
    with pytest.raises(ValueError, match="span"):
        Span.parse(text)


def test_parse_allows_spaces() -> None:
    assert Span.parse(" 3 : 7 ") == Span(3, 7)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_the_maximal_runs_nobody_holds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        num_blocks = rng.randrange(12)
        spans = [
            Span(start, start + rng.randint(1, 5))
            for start in (rng.randrange(14) for _ in range(rng.randrange(5)))
        ]
        held = {block for span in spans for block in range(span.start, span.stop)}

        gaps = find_gaps(num_blocks, spans)

        missing = [block for gap in gaps for block in range(gap.start, gap.stop)]
        assert missing == [block for block in range(num_blocks) if block not in held]
        assert all(left.stop < right.start for left, right in itertools.pairwise(gaps))


def test_gaps_of_no_blocks_are_none() -> None:
    assert find_gaps(0, []) == []
    assert find_gaps(0, [Span(2, 3)]) == []
