"""What a peer of a run announces, whatever the run has come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import describe_run

from shoal.peer.announcing.run_description import RunDescription
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.net.network import Addresses
from shoal.protocol.records.announcements import (
    MAX_LOSS,
    PeerState,
    read_announcement,
    sign_announcement,
)
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.training_run import read_run
from shoal.protocol.spans import Span

IDENTITY = Identity(bytes(32))
NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("loss", "announced"), [(4.56789, 4.5679), (1e30, MAX_LOSS), (-1e-9, 0.0), (-1e30, 0.0)]
)
def test_peer_announces_itself_whatever_the_loss(loss: float, announced: float) -> None:
    presence: Any = SimpleNamespace(
        identity=IDENTITY,
        addresses=Addresses([Endpoint("127.0.0.1", 1, "f" * 64)], {}),
        relays=(),
        directory_port=0,
    )
    record = sign_run(IDENTITY, read_run(describe_run()))
    description = RunDescription(record, 4, presence, 30.0)

    description.note_held_out(loss)
    description.note(Span(0, 2), 1, loss)
    signed = sign_announcement(IDENTITY, description.describe(PeerState.ONLINE, 1, NOW))

    training = read_announcement(signed, NOW).training
    assert training is not None
    assert (training.loss, training.held_out_loss) == (announced, announced)
