"""What a local swarm is told by its user, before and after it has processes."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest
import torch

from shoal.peer.local_swarm.swarm import LocalPeer, LocalSwarm, PeerProcessError, make_place
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span


@pytest.mark.parametrize("model", [None, "", 5])
def test_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="the model must be a directory"):
        LocalSwarm(model, spans=[(0, 1)])


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ("0:4", "a pair of whole numbers"),
        ([], "at least one span"),
        (["0:4"], r"a pair of whole numbers such as \(0, 4\), not '0:4'"),
        ([0], "a pair of whole numbers"),
        ([(0, 1, 2)], "a pair of whole numbers"),
        ([(0.0, 4.0)], "a pair of whole numbers"),
        ([(False, True)], "a pair of whole numbers"),
        ([(-1, 4)], "0 <= start < stop"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LocalSwarm("m", spans)


def test_numbers_of_other_libraries_are_taken() -> None:
    assert make_place((numpy.int64(0), torch.tensor(4))) == Span(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "W: odd\nshoal serve: no such model",
            "the peer of blocks 0:1 cannot start: no such model",
        ),
        ("killed", "the peer of blocks 0:1 ended before it was online: killed"),
        ("", "the peer of blocks 0:1 ended before it was online: it said nothing"),
    ],
)
@pytest.mark.parametrize("event", ["directory", "online"])
def test_end_of_a_peer_is_told_in_its_own_words(said: str, sentence: str, event: str) -> None:
    peer = LocalPeer("m", Span(0, 1), (), program=("-c", f"import sys; sys.exit({said!r} or 0)"))
    try:
        with pytest.raises(PeerProcessError) as refusal:
            peer.wait_for(event, time.monotonic() + 60)
    finally:
        peer.close(time.monotonic() + 60)

    assert str(refusal.value) == sentence


@pytest.mark.slow
def test_draining_takes_a_swarm_that_gives_time_for_it() -> None:
    peer = LocalPeer("m", None, (), program=("-c", "pass"))
    try:
        with pytest.raises(UsageError, match="drain_seconds="):
            peer.drain()
    finally:
        peer.close(time.monotonic())


def test_peer_that_has_ended_can_be_neither_paused_nor_resumed() -> None:
    peer = LocalPeer("m", Span(0, 1), (), program=("-c", "pass"))
    try:
        peer.wait(60)
        for act in (peer.pause, peer.resume):
            with pytest.raises(UsageError, match="has ended"):
                act()
    finally:
        peer.close(time.monotonic())
