"""What a peer that loads its blocks, and trains, knows of itself, for tests of its metrics."""

from typing import Any

from announcements import MODEL, identity_of

from shoal.peer.engine.compute_thread import ComputeCounts
from shoal.peer.operating.figures import Figures
from shoal.peer.operating.run_figures import RunFigures
from shoal.peer.process.config import PeerEvent
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.records.announcements import PeerState

RUN: dict[str, Any] = {
    "name": "stories",
    "owner": "12D3",
    "run_id": "993747e6",
    "num_updates": 30,
    "parts_per_update": 4,
    "tokens_per_update": 64,
}
"""The facts of the event `training`, by which a peer tells the run that it trains."""

UPDATE: dict[str, Any] = {
    "update": 6,
    "stage": 1,
    "loss": 6.0,
    "gradient_norm": 1.7,
    "averaging_seconds": 0.25,
    "queue_seconds": [0.02, 1.2],
    "parts_redone": 0,
    "members_per_stage": [2, 2],
}
"""The facts of the event `update`."""


def make_figures() -> Figures:
    """Return the figures of such a peer."""
    return Figures(
        peer_id=identity_of(1).peer_id,
        model_id=MODEL,
        state=PeerState.JOINING,
        span=None,
        num_blocks=8,
        replicas=None,
        num_announcements=0,
        loop_lag_seconds=0.25,
        loop_lag_max_seconds=0.5,
        measured={},
        service=ServiceCounts(),
        compute=ComputeCounts(),
    )


def make_run_figures() -> RunFigures:
    """Return the figures of a peer that applies updates 6 and 7, and loses a member then."""
    later = {**UPDATE, "update": 7, "loss": 5.5, "parts_redone": 3}
    run = RunFigures()
    events: list[tuple[str, dict[str, Any]]] = [
        ("online", RUN),
        ("update", UPDATE),
        ("held_out", {"update": 6, "loss": 5.75, "entropy": None}),
        ("update", later),
        ("update", later),  # it takes the state once more
        ("online", {"span": "0:4"}),
        ("member_left", {"peer": "12D3", "stage": 1, "members_per_stage": [2, 1]}),
    ]
    for name, facts in events:
        run.note(PeerEvent(name, facts))
    return run
