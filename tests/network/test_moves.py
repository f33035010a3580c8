"""A peer moves, as a real process: it finds no file there, or is stopped on its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from directory_processes import read_announcements
from processes import children_of, wait_until_dead

from shoal.peer.local_swarm.swarm import SHOAL_PROGRAM, LocalPeer, LocalSwarm
from shoal.protocol.records.announcements import PeerState
from shoal.protocol.spans import Span

pytestmark = [pytest.mark.network, pytest.mark.slow]

PATIENCE_SECONDS = 120.0
FIRST, LAST = Span(0, 2), Span(2, 4)
STOPPING_PROGRAM = (str(Path(__file__).with_name("stopping_peer.py")),)


@contextmanager
def bring_to_move(
    directory: Path, program: Sequence[str] = SHOAL_PROGRAM
) -> Iterator[tuple[LocalSwarm, LocalPeer, LocalPeer]]:
    """Start a peer that chooses its blocks, and yield it and the one that is alone with others."""
    with LocalSwarm(
        directory, spans=[FIRST, LAST], weights="fp32", announce_period_seconds=2.0
    ) as swarm:
        mover = swarm.add(2, program=program)
        (lone,) = [peer for peer in swarm.peers[:2] if peer.span != mover.span]
        yield swarm, mover, lone


def wait_for(peer: LocalPeer, event: str) -> None:
    peer.wait_for(event, time.monotonic() + PATIENCE_SECONDS)


def assert_it_left(swarm: LocalSwarm, peer: LocalPeer, children: list[int]) -> None:
    assert peer.wait(PATIENCE_SECONDS) == 0
    wait_until_dead(children)
    assert asyncio.run(read_announcements(swarm))[peer.peer_id].state is PeerState.OFFLINE
    assert peer.log() == "it said nothing"


def test_peer_that_finds_no_file_for_its_new_blocks_goes_back(
    tiny_models: Any, tmp_path: Path
) -> None:
    tiny_models.get("llama").reference.save_pretrained(tmp_path, max_shard_size="50KB")
    with bring_to_move(tmp_path) as (_, mover, lone):
        before, block = mover.span, lone.span.start
        for path in tmp_path.glob("model-*.safetensors"):
            if f"layers.{block}.".encode() in path.read_bytes():
                path.unlink()

        lone.kill()
        wait_for(mover, "returning")
        wait_for(mover, "online")

        assert mover.span == before
        assert f"block {block} cannot be loaded" in mover.facts["why"]
        mover.terminate()
        assert mover.wait(PATIENCE_SECONDS) == 0
        assert mover.log() == "it said nothing"


@pytest.mark.thorough
def test_peer_that_is_stopped_while_it_loads_other_blocks_leaves(tiny_models: Any) -> None:
    directory = tiny_models.get("llama").directory
    with bring_to_move(directory, STOPPING_PROGRAM) as (swarm, mover, lone):
        children = children_of(mover.pid)
        assert children, "the peer has a p2pd"

        lone.kill()

        assert_it_left(swarm, mover, children)
        assert mover.facts["event"] == "left" or mover.facts["target"] == str(lone.span)
