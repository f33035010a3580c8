"""Which blocks the peers of `shoal swarm` host."""

from __future__ import annotations

import pytest

from shoal.cli.commands.demo import plan_demo_spans
from shoal.cli.options.layout import choose_num_replicas, cut_evenly, plan_spans
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 8, 80])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_cut_holds_every_block_once_in_parts_of_nearly_one_length(
    num_blocks: int, num_parts: int
) -> None:
    if num_parts > num_blocks:
        with pytest.raises(UsageError):
            cut_evenly(num_blocks, num_parts)
        return

    spans = cut_evenly(num_blocks, num_parts)

    assert [block for span in spans for block in range(span.start, span.stop)] == list(
        range(num_blocks)
    )
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize("num_peers", range(1, 17))
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_plan_gives_every_peer_a_span_and_every_block_its_replicas(
    num_peers: int, num_replicas: int
) -> None:
    if num_peers < num_replicas or num_peers > 8 * num_replicas:
        with pytest.raises(UsageError):
            plan_spans(8, num_peers, num_replicas)
        return

    spans = plan_spans(8, num_peers, num_replicas)

    assert len(spans) == num_peers
    for block in range(8):
        assert sum(block in span for span in spans) == num_replicas


def test_plan_makes_equal_rows_when_replicas_divide_the_peers() -> None:
    assert plan_spans(8, 4, 2) == [Span(0, 4), Span(4, 8), Span(0, 4), Span(4, 8)]


def test_replicas_are_two_from_four_peers_on() -> None:
    assert [choose_num_replicas(num_peers) for num_peers in (1, 3, 4, 9)] == [1, 1, 2, 2]


def test_demo_has_two_peers_in_the_middle() -> None:
    assert list(map(str, plan_demo_spans(8))) == ["0:3", "3:6", "3:6", "6:8"]
    assert list(map(str, plan_demo_spans(24))) == ["0:8", "8:16", "8:16", "16:24"]
