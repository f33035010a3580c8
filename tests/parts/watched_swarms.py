"""States of a monitor, where a test has little to say about the dials behind them."""

from __future__ import annotations

from announcements import MODEL, NOW

from shoal.client.monitor.state import ProbeResult, SwarmState, reduce_probe, reduce_reading
from shoal.protocol.ids import ModelId
from shoal.protocol.records.announcements import Announcement


def read(
    *announced: Announcement,
    state: SwarmState | None = None,
    now: float = NOW,
    model_id: ModelId = MODEL,
) -> SwarmState:
    """Return the state after a reading, with an answer of each peer that was not dialled before."""
    state, _ = reduce_reading(state or SwarmState(), model_id, announced, now)
    for peer in [*state.models[model_id].peers.values()] if model_id in state.models else []:
        if peer.probe is None:
            answer = ProbeResult(now, rtt_seconds=0.01)
            state, _ = reduce_probe(state, model_id, peer.announcement.peer_id, answer)
    return state
