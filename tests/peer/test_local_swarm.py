"""What a local swarm is told by its user, before and after it has processes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.peer.local_swarm import LocalPeer, LocalSwarm
from shoal.protocol.errors import UsageError
from shoal.protocol.spans import Span


@pytest.mark.parametrize("model", [None, "", 5])
def test_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="the model is a directory"):
        LocalSwarm(model, spans=[(0, 1)])


def test_unknown_setting_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="does not know colour; settings are weights, num_threads"):
        LocalSwarm("m", spans=[(0, 1)], colour="red")


def test_peer_that_has_ended_can_be_neither_paused_nor_resumed() -> None:
    peer = LocalPeer("m", Span(0, 1), (), program=("-c", "pass"))
    try:
        peer.wait(60)
        for act in (peer.pause, peer.resume):
            with pytest.raises(UsageError, match="has ended"):
                act()
    finally:
        peer.close(time.monotonic())
