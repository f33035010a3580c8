"""Who has come, or come back."""

from __future__ import annotations

from dataclasses import replace

from announcements import describe_peer

from shoal.client.publishing.arrivals import Arrivals
from shoal.protocol.ids import ModelId, PeerId
from shoal.protocol.spans import Span


def test_who_was_not_there_was_restarted_or_has_other_blocks_is_new() -> None:
    facts = {"peer_id": PeerId("P"), "model_id": ModelId("a" * 32), "num_blocks": 6}
    dates = {"issued_at": 0.0, "expires_at": 600.0, "sequence": 1_700_000_000_000}
    arrivals, peer = Arrivals(), describe_peer(span=Span(0, 6), **facts, **dates)
    assert arrivals.list_new([peer]) == [peer]
    later = replace(peer, sequence=peer.sequence + 50)
    assert arrivals.list_new([later]) == []
    restarted = replace(peer, sequence=peer.sequence + 10_000)
    assert arrivals.list_new([restarted]) == [restarted]
    moved = replace(restarted, span=Span(1, 2))
    assert arrivals.list_new([moved]) == [moved]
    assert arrivals.list_new([]) == []
    assert arrivals.list_new([moved]) == [moved]
